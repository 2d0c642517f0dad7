"""Sum over tensor-parallel ranks on CPUs, in one order and rounded once.

vLLM 0.32 sums in shared memory where it was compiled for AVX-512: each rank adds the others to its
own in fp32, so that ranks may round a sum differently, and CPUs without AVX-512's bfloat16
instructions round toward zero. Elsewhere it takes gloo, which rounds after every addition, in an
order that depends on where in its batch a token is. Here parts are gathered, and every rank adds
them up from the first to the last (`quant.kernels.ranks.sum_of_ranks`), as the learner does. Remove
this when vLLM sums in one order and rounds to the nearest.
"""

import functools

from torch import Tensor

from qarl.quant.kernels.ranks import sum_of_ranks


def sum_in_rank_order() -> None:
    """Make vLLM's all-reduce add up from the first to the last; idempotent.

    Sums of integers are left to vLLM.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    reduce = CpuCommunicator.all_reduce
    if hasattr(reduce, "__wrapped__"):
        return

    @functools.wraps(reduce)
    def all_reduce(self: CpuCommunicator, input_: Tensor) -> Tensor:
        if not input_.is_floating_point():
            return reduce(self, input_)
        parts = self.all_gather(input_[None], dim=0)
        return input_.copy_(sum_of_ranks(parts.unbind()))

    CpuCommunicator.all_reduce = all_reduce  # type: ignore[method-assign]
