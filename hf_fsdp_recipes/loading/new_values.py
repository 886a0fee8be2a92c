"""Creates the values of parameters that are in no checkpoint, at the moment when they are sent to the shards.

The rank that reads the values holds only a few modules at a time, never the full new model.
"""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT_BYTES = 64 * 1024 * 1024  # keep the latest modules' values up to this size; the stream reads no further ahead
MAX_LARGE = 2  # modules kept even above KEPT_BYTES: the module being read and the one before it


class NewValues:
    """Creates values with the model's own initialization when they are read. Every read returns the same values.

    The values depend on the seed, the module and its place in the model, but not on the number of ranks.

    Args:
        model: the model on meta. If the model will be sharded before its values are read, pass a copy.
        seed: seed of the values that `read` returns.
    """

    def __init__(self, model: "PreTrainedModel", seed: int) -> None:
        self._model = model
        self._seed = seed
        self._kept: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()  # module name -> its values
        self._lock = threading.Lock()  # reads come from several threads

    def read(self, number: int, module_name: str, leaf: str) -> torch.Tensor:
        """Return the values of a module's parameter `leaf`. `number` is the module's place among the modules with new values."""
        with self._lock:
            if module_name not in self._kept:
                while len(self._kept) >= MAX_LARGE and self._count_bytes() > KEPT_BYTES:
                    self._kept.popitem(last=False)
                with torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(self._seed + number)
                    self._kept[module_name] = self.create(module_name)
            self._kept.move_to_end(module_name)
            return self._kept[module_name][leaf]

    def _count_bytes(self) -> int:
        return sum(values.nbytes for module in self._kept.values() for values in module.values())

    @torch.no_grad()
    def create(self, module_name: str) -> dict[str, torch.Tensor]:
        """Return one module's values, drawn from the current random state. Other modules stay on meta and are not initialized."""
        from transformers import PreTrainedModel

        path: list[torch.nn.Module] = [self._model]
        for name in module_name.split(".") if module_name else ():
            path.append(path[-1].get_submodule(name))
        module, on_meta = path[-1], dict(path[-1]._parameters)
        for leaf, parameter in on_meta.items():
            if parameter is not None:
                module._parameters[leaf] = torch.nn.Parameter(
                    torch.empty_like(parameter, device="cpu"), requires_grad=False
                )
        try:
            # The module, then its ancestors, because some classes initialize their children (GPT2Attention: c_proj).
            for depth in range(len(path), 0, -1):
                models = [each for each in path[:depth] if isinstance(each, PreTrainedModel)]
                models[-1]._init_weights(path[depth - 1])
            return {leaf: values.detach() for leaf, values in module._parameters.items() if values is not None}
        finally:
            module._parameters.update(on_meta)
