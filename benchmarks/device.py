"""What measuring asks of a device: time, memory, and the kernels that peers are given.

Whatever differs between the cores of the host and a GPU is in the two classes of this file.
"""

import ctypes
import gc
import os
import platform
import time

import torch

from . import memory
from .provenance import processor

aten = torch.ops.aten


def heads_outside(*tensors):
    """(B, S, H, D) as torch's kernels want it, (B, H, S, D); and back."""
    return [x.transpose(1, 2) for x in tensors]


class Cpu:
    """The cores of the host. A rank computes on one thread."""

    kind, backend, dtype = "cpu", "gloo", "float32"
    # One thread takes seconds for a few heads.
    heads = {"FLUX": 4, "Wan": 2}
    layers = 1
    diffusers_patch = "its own attention kernels ask for a GPU: it is given torch's CPU flash kernel"

    def __init__(self):
        torch.set_num_threads(1)
        self.place = torch.device("cpu")
        self.libc = ctypes.CDLL(None)

    def machine(self):
        return f"{processor()}, {self.cores()} cores, Linux {platform.release()}"

    def cores(self):
        """How many ranks can compute at a time."""
        return len(os.sched_getaffinity(0))

    def seconds(self, call):
        """Wall time of a call."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def memory(self):
        """Bytes in use by this process, with its own window, without those of others."""
        self._trim()
        mapped, own = memory.windows()
        return memory.value_of("smaps_rollup", "Rss") - mapped + own

    def peak(self, call, before):
        """(what a call returns, the most bytes that were in use in it beyond `before`)."""
        self._trim()
        memory.reset_peak()
        result = call()
        return result, memory.extra(before, 0)

    def _trim(self):
        # What nobody holds any more, and what the allocator keeps in stock, would count as in use.
        gc.collect()
        if hasattr(self.libc, "malloc_trim"):
            self.libc.malloc_trim(0)

    def attend(self, q, k, v):
        """(out, lse) of (B, S, H, D) tensors; lse is (B, S, H)."""
        q, k, v = heads_outside(q, k, v)
        return heads_outside(*aten._scaled_dot_product_flash_attention_for_cpu(q, k, v))

    def gradients(self, dout, q, k, v, out, lse):
        """dq, dk, dv of a block of keys, from the out and lse of all keys."""
        given = heads_outside(dout, q, k, v, out, lse)
        return heads_outside(*aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, False))

    def diffusers_kernels(self):
        """diffusers' forward_op and backward_op, made of `attend` and `gradients`."""

        def forward(
            ctx,
            query,
            key,
            value,
            attn_mask=None,
            dropout_p=0.0,
            is_causal=False,
            scale=None,
            enable_gqa=False,
            return_lse=False,
            _save_ctx=True,
            _parallel_config=None,
        ):
            out, lse = self.attend(query, key, value)
            if _save_ctx:
                ctx.save_for_backward(query, key, value, out, lse)
            return (out, lse) if return_lse else out

        def backward(ctx, grad_out, *rest, **block):
            names = ("query", "key", "value", "out", "lse")
            saved = dict(zip(names, ctx.saved_tensors, strict=False))
            return self.gradients(grad_out, *(block.get(name, saved[name]) for name in names))

        return forward, backward


class Cuda:
    """One GPU a rank."""

    kind, backend, dtype = "cuda", "cpu:gloo,cuda:nccl", "bfloat16"
    heads, layers = {}, None  # the models' own
    diffusers_patch = "with its kernel _native_flash"

    def __init__(self):
        index = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(index)
        self.place = torch.device("cuda", index)

    def machine(self):
        names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}))
        return f"{self.cores()} x {names}, CUDA {torch.version.cuda}, {processor()}"

    def cores(self):
        return torch.cuda.device_count()

    def seconds(self, call):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def memory(self):
        """Bytes in use on the GPU, by whoever in this process."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def peak(self, call, before):
        """As `Cpu.peak`: torch's own at its peak, and what else, such as a context's workspace, is in use after it."""
        others = self.memory() - torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        others = max(others, self.memory() - torch.cuda.memory_reserved())
        return result, others + torch.cuda.max_memory_allocated() - before

    def attend(self, q, k, v):
        q, k, v = heads_outside(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v)
        return heads_outside(out, lse)

    def gradients(self, dout, q, k, v, out, lse):
        dout, q, k, v, out, lse = (x.contiguous() for x in heads_outside(dout, q, k, v, out, lse))
        nothing = torch.empty(0, dtype=torch.int64, device=q.device)  # without dropout there is no random state
        given = dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False, nothing, nothing
        return heads_outside(*aten._scaled_dot_product_flash_attention_backward(*given))

    def diffusers_kernels(self):
        from diffusers.models import attention_dispatch

        names = ("_native_flash_attention_forward_op", "_native_flash_attention_backward_op")
        return [getattr(attention_dispatch, name) for name in names]


DEVICES = {"cpu": Cpu, "cuda": Cuda}
