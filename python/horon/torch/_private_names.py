"""Private names of Horovod's wrapper that mean nothing here, so that writing them is no silent change of a script."""

from __future__ import annotations

from typing import Any, NoReturn

_CONSTRUCTOR = "Give {} to hvd.DistributedOptimizer."
_HOOKS = "Gradients are reduced in hooks of horon's own; a Compression of your own sees each of them."
_INSTEAD = {
    "_handles": "optimizer.synchronize() waits for what is in flight.",
    "_synchronized": "Call optimizer.synchronize(), and then step() within optimizer.skip_synchronize().",
    "_allreduce_delay": "Set optimizer.backward_passes_per_step.",
    "_compression": _CONSTRUCTOR.format("compression"),
    "_groups": _CONSTRUCTOR.format("groups"),
    "_p_to_group": _CONSTRUCTOR.format("groups"),
    "_group_counts": _CONSTRUCTOR.format("groups"),
    "_grad_accs": "The hooks go when the optimizer is deleted.",
    "_make_hook": _HOOKS,
    "_register_hooks": _HOOKS,
    "_allreduce_grad_async": _HOOKS,
}
_INSTEAD_FOR_ADASUM = {
    **_INSTEAD,
    "_should_synchronize": "With Adasum, step() always combines the ranks' steps.",
    "_requires_update": "With Adasum, all parameters take part in every step.",
    "_starting_models": "The parameters before a step are kept in memory of horon's own.",
}


class _NotWritten:
    """An attribute that is missing, and that can not be set either.

    Descriptors, since a __setattr__ of ours would slow every attribute down that step() sets.
    """

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> NoReturn:
        raise AttributeError(
            f"horon: a DistributedOptimizer has no {self._name}, a private name of Horovod's. {self._instead}"
        )

    def __set__(self, instance: Any, value: Any) -> NoReturn:
        raise AttributeError(
            f"horon: {self._name} is a private name of Horovod's DistributedOptimizer; to set it would change nothing "
            f"here. {self._instead}"
        )


def names_not_written(optimizer: Any, is_adasum: bool) -> dict[str, Any]:
    """Attributes for the class of a wrapper: reading is an AttributeError, and so is writing.

    Args:
        optimizer: The one that is wrapped. A name that it has itself stays its own.
        is_adasum: Whether the wrapper is Adasum's.
    """
    instead = _INSTEAD_FOR_ADASUM if is_adasum else _INSTEAD
    return {name: _NotWritten(text) for name, text in instead.items() if not hasattr(optimizer, name)}
