"""What compute-sanitizer watches: the pack kernel on awkward tensors, and a fused call. One rank, few seconds.

compute-sanitizer --tool memcheck python tests/gpu/sanitized_program.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist


def _tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of odd sizes, at odd offsets, and more of them than one launch's table holds."""
    sizes = [1, 3, 15, 17, 255, 4097, 70001, *[i % 7 + 1 for i in range(1200)]]
    wholes = [(torch.arange(size + 1) % 13).to(dtype).to("cuda") for size in sizes]
    return [whole[i % 2 : whole.numel() - 1 + i % 2] for i, whole in enumerate(wholes)]


def main() -> None:
    """Packs, unpacks and reduces; checks what comes back."""
    from horon import _C

    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        tensors = _tensors(dtype)
        expected = [tensor.cpu() for tensor in tensors]
        n_bytes = sum((tensor.numel() * tensor.element_size() + 15) // 16 * 16 for tensor in tensors)
        buffer = torch.empty(n_bytes // tensors[0].element_size(), dtype=dtype, device="cuda")
        factor = 1.0 if dtype is torch.uint8 else 2.0
        _C.cuda_pack(tensors, buffer, factor=factor)
        _C.cuda_unpack(buffer, tensors, factor=1.0 / factor)
        torch.cuda.synchronize()
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.cpu(), wanted), f"{dtype}: unpacked is not what was packed"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("horon", init_method=f"file://{folder}/store", rank=0, world_size=1)
        tensors = _tensors(torch.float32)
        expected = [tensor.cpu() for tensor in tensors]
        with dist.distributed_c10d._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.cpu(), wanted), "the sum over one rank is not the tensor"
        dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
