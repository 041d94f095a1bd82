"""What the Horovod-compatible API shares between frameworks: ``horon.common``, as scripts import it from Horovod."""
