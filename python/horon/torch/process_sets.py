"""Process sets, also under horon.torch. See :mod:`horon.common.process_sets`."""

from horon.common.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
