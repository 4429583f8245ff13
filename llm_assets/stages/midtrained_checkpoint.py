"""Stage 5: the annealing pass: the base goes on over the shards in another order.

Takes `base_checkpoint` and `shards`; gives a `checkpoint`. The learning rate decays to zero by the
end (linear unless the recipe says otherwise). The optimizer starts anew.
"""

from __future__ import annotations

from llm_assets.stages.context import StageContext, StageResult
from llm_assets.stages.pretraining import pretrain
from llm_assets.stages.training import load_model, load_tokenizer

# Added to the seed, so that the rows do not come in the order of stage 4.
_ORDER = 1


def run(context: StageContext) -> StageResult:
    """Load the base, train it on, store it."""
    base = context.inputs["base_checkpoint"].path
    tokenizer = load_tokenizer(base)
    return pretrain(context, load_model(base), tokenizer, data_seed=context.seed + _ORDER)
