"""The only place for private or undocumented names of upstream packages.

`patches` has the functions that are replaced. The other modules have the names that are imported,
read or set: those of one package each, and those that only the planner needs.

docs/upstream.md lists the names. tests/private_names.py finds them in the code, and tests/upstream
checks that the installed versions have them.
"""
