"""Ways to damage a checkpoint: by accident, or with a pickle that runs code when it is loaded.

Also used by benchmarks/soak.py.
"""

import functools
import io
import json
import os
import pickle
from collections import OrderedDict

import torch

ACCIDENTS = ("flip", "overwrite", "truncate", "extend", "replace", "delete")
# This folder holds tensors, and entries that torch DCP unpickles, such as the learning rate.
PART = "optimizer_0"


def damage(file, way, choose):
    """Damage a file at a random place, or replace it with another one of its directory."""
    content = file.read_bytes()
    others = [path for path in file.parent.iterdir() if path.is_file() and path != file]
    start = choose.randrange(len(content))
    flipped = bytes([content[start] ^ 1 << choose.randrange(8)])
    damaged = {
        "flip": content[:start] + flipped + content[start + 1 :],
        "overwrite": content[:start] + choose.randbytes(16) + content[start + 16 :],
        "truncate": content[:start],
        "extend": content + choose.randbytes(16),
        "replace": choose.choice(others).read_bytes(),
    }
    if way == "delete":
        file.unlink()
    else:
        file.write_bytes(damaged[way])


class Reduced:
    """Is unpickled as what `function(*arguments)` returns, with the attributes `state`."""

    def __init__(self, function, arguments, state=None):
        self._parts = function, arguments, state

    def __reduce__(self):
        return self._parts


def payload(canary):
    """Return an object that creates the directory `canary` when unrestricted pickle reads it."""
    return Reduced(os.mkdir, (str(canary),))


def forge(way, checkpoint, canary):
    """Put a payload into a checkpoint, and make its manifest match, as an attacker would."""
    from hf_fsdp_recipes.saving.hashing import read_facts

    (ATTACKS | ATTACKS_ON_TRAINER)[way](checkpoint, canary)
    manifest = checkpoint / "manifest.json"
    if manifest.is_file():
        content = json.loads(manifest.read_text())
        listed = [
            name
            for name in content["files"]
            if (checkpoint / name).is_file() and way != f"unlisted {name}"
        ]
        content.pop("xxh3")
        content["files"] = {name: read_facts(checkpoint / name) for name in listed}
        manifest.write_text(json.dumps(content))


def _metadata(checkpoint, canary, name=".metadata"):
    (checkpoint / PART / ".metadata").unlink()
    (checkpoint / PART / name).write_bytes(pickle.dumps(payload(canary)))


def _stock(checkpoint, canary):
    """Make it look as if Trainer had written the checkpoint without FSDP."""
    (checkpoint / "manifest.json").unlink()
    for file in checkpoint.rglob("*.distcp"):
        file.unlink()
    _metadata(checkpoint, canary)


def _entry(checkpoint, canary, disguise=""):
    """Put the payload in the place of the learning rate, where a simple check does not see it."""
    part = checkpoint / PART
    metadata = pickle.loads((part / ".metadata").read_bytes())
    index, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn.endswith("lr"))
    content = (part / info.relative_path).read_bytes()
    forged = _saved(payload(canary))
    info.offset = len(content)
    info.length = len(forged)
    (part / info.relative_path).write_bytes(content + forged)
    if disguise == "folder":  # a harmless file has the same name
        texts = (_saved("x" * length) for length in range(1000))
        harmless = next(text for text in texts if len(text) == len(forged))
        (part / info.relative_path).write_bytes(content + harmless)
        (part / "folder").mkdir()
        (part / "folder" / info.relative_path).write_bytes(content + forged)
        info.relative_path = f"folder/{info.relative_path}"
    if disguise == "tensor":
        metadata.state_dict_metadata[index.fqn].chunks = []
    if disguise == "items":  # the dict has an attribute `items`, a function that returns nothing
        metadata.storage_data = Reduced(
            OrderedDict, (list(metadata.storage_data.items()),), {"items": torch.Size}
        )
    (part / ".metadata").write_bytes(pickle.dumps(metadata))


def _saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _pickle(checkpoint, canary, pattern):
    next(checkpoint.glob(pattern)).write_bytes(_saved({"python": payload(canary)}))


# On files that Trainer writes without shards. They pass as intact; Trainer reads them with
# restrictions.
ATTACKS_ON_TRAINER = {
    "random state": functools.partial(_pickle, pattern="rng_state*.pth"),
    "schedule": functools.partial(_pickle, pattern="scheduler.pt"),
    "optimizer": functools.partial(_pickle, pattern="optimizer.pt"),
}


ATTACKS = {
    "metadata": _metadata,
    f"unlisted {PART}/.metadata": _metadata,
    "metadata of a rank, which torch DCP falls back to": functools.partial(
        _metadata, name="__0.metadata"
    ),
    "checkpoint of stock Trainer": _stock,
    "entry": _entry,
    "entry in a folder": functools.partial(_entry, disguise="folder"),
    "entry like a tensor": functools.partial(_entry, disguise="tensor"),
    "entry in a dict without items": functools.partial(_entry, disguise="items"),
    "random state": ATTACKS_ON_TRAINER["random state"],
}
