"""Router of experts on CPUs that scores by sigmoid or corrects scores, without groups of experts.

vLLM 0.32's router for CPUs has both for experts in groups alone: without groups it leaves out the
correction bias (ERNIE 4.5), and raises an assertion without text for sigmoids (MiniMax-M2). One
group of all experts chooses the same experts with the same weights as vLLM's kernels on GPUs
without groups. Remove this when the router has them.
"""

import functools
from typing import Any


def route_in_one_group() -> None:
    """Make vLLM's router on CPUs take one group of all experts where it would fail; idempotent.

    This applies to layers that are built afterwards.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    make = CPURouter.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def construct(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        corrected = self.e_score_correction_bias is not None
        if (
            self.custom_routing_function is None
            and not self.use_grouped_topk
            and (self.scoring_func == "sigmoid" or (self.scoring_func == "softmax" and corrected))
        ):
            self.use_grouped_topk = True
            self.num_expert_group = self.topk_group = 1
            # vLLM's routers on GPUs scale corrected weights alone
            if not corrected:
                self.routed_scaling_factor = 1.0

    CPURouter.__init__ = construct  # type: ignore[method-assign]
