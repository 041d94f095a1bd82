"""State of PyTorch training. Source: Horovod 0.28.1 ``torch.elastic.state``."""

from __future__ import annotations

import copy
from typing import Any

import torch

from horon.common.basics import rank
from horon.common.elastic import ObjectState
from horon.torch.elastic.sampler import ElasticSampler
from horon.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Saves, restores and sends one object. Derive from it for types of your own.

    Args:
        value: The object.

    Source: Horovod 0.28.1 ``StateHandler``.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copies the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Sends rank 0's state to all."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Takes another object, and saves its state."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Of an object with state_dict() and load_state_dict()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """Of a module. Source: Horovod 0.28.1 ``ModelStateHandler``."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """Of an optimizer. Source: Horovod 0.28.1 ``OptimizerStateHandler``."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_StateDictHandler):
    """Of an ElasticSampler. Source: Horovod 0.28.1 ``SamplerStateHandler``."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class SchedulerStateHandler(SamplerStateHandler):
    """Of a learning rate scheduler, whose optimizer is another attribute, or stays as it is.

    Not in Horovod, which sends the scheduler with a copy of its optimizer: other ranks' schedulers then set the rate of
    that copy.
    """


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, SchedulerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The handlers by type; append to it for other types. Source: Horovod 0.28.1 ``get_handler_registry``."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces the handlers. Source: Horovod 0.28.1 ``set_handler_registry``."""
    _handler_registry[:] = registry


class TorchState(ObjectState):
    """State of a training: models, optimizers, LR schedulers, samplers, and plain objects, all of them attributes.

    Args:
        model: A module.
        optimizer: An optimizer.
        kwargs: More of them under other names, and plain objects (epoch, batch, ...).

    Source: Horovod 0.28.1 ``TorchState``.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        self._handlers: dict[str, StateHandler] = {}
        plain: dict[str, Any] = {}
        for name, value in kwargs.items():
            handler = _handler_of(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
            handler.save()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


def _handler_of(value: Any) -> StateHandler | None:
    for handled, handler in _handler_registry:
        if isinstance(value, handled):
            return handler(value)
    return None
