"""Where the stand-in's tensors live, and whether they can still be read."""

import torch
from torch.distributed.tensor import DTensor


def host_device(device: torch.device | str | int | None) -> torch.device:
    """Returns the device that stands for `device`: `meta` stays, everything else is the CPU.

    Megatron passes the result of `torch.cuda.current_device()`, an index without a type.
    """
    if isinstance(device, int) or device is None:
        return torch.device("cpu")
    return torch.device("meta" if torch.device(device).type == "meta" else "cpu")


def require_live(tensor: torch.Tensor, role: str) -> torch.Tensor:
    """Returns `tensor`, after checking that its storage still holds its elements.

    FSDP releases a parameter by resizing its storage to zero bytes. A GPU kernel then reads foreign
    memory; on a CPU the same read ends the process, so it is turned into an error here.

    Raises:
        RuntimeError: the storage is smaller than the view that `tensor` describes.
    """
    if isinstance(tensor, DTensor) or tensor.is_meta or tensor.numel() == 0:
        return tensor
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if held < needed:
        raise RuntimeError(
            f"Cannot read the {role} of shape {tuple(tensor.shape)}: its storage was released. "
            f"Expected {needed} bytes, got {held}."
        )
    return tensor


def cast_if_needed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `tensor` itself when it has `dtype` already, so that identity is kept for saving."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
