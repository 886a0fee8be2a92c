"""`tests/private_names.py` finds each way to use a private name of upstream, and none of ours."""

import pytest

from tests.private_names import find_uses


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("model._units", "_units"),
        ("model._units = ()", "_units"),
        ("del model.inner._units", "_units"),
        ("getattr(model, '_units', None)", "_units"),
        ("setattr(model, '_units', ())", "_units"),
        ("hasattr(model, '_units')", "_units"),
        ("mock.patch.object(model, '_units', ())", "_units"),
        ("mock.patch.multiple(model, _units=())", "_units"),
        ("pkgutil.resolve_name('trl.Trainer._units')", "_units"),
        ("from trl import _units", "trl._units"),
        ("from trl import _units as units", "trl._units"),
        ("from trl._units import find", "trl._units.find"),
        ("import trl._units", "trl._units"),
        ("import trl._units as units", "trl._units"),
        ("from trl.trainer.utils import find", "trl.trainer.utils.find"),
        ("from transformers import masking_utils", "transformers.masking_utils"),
        # A class's `self` has its own names and those of its base class.
        ("class Ours(Theirs):\n    def find(self):\n        return self._units", "_units"),
    ],
)
def test_a_private_name_of_another_package_is_found(source, name):
    line = source.count("\n") + 1
    assert find_uses(source) == [(line, name)]


@pytest.mark.parametrize(
    "source",
    [
        "from hf_fsdp_recipes.cli import _units",
        "from _thread import _count",
        "from . import _units",
        "class Ours:\n    def __init__(self):\n        self._units = 0\n        self._units += 1",
        "class Ours:\n    def _find(self):\n        return self._find()",
        "def _find():\n    '''Call `model._units`.'''\n    return _find",
        "model.__dict__",
        "name = f'{kind}_units'",
        "raise ValueError('Trainer saves without _units, so this fails')",
        "flops._asdict()",
        "for _ in range(2): pass",
    ],
)
def test_own_names_and_public_names_are_not(source):
    assert find_uses(source) == []
