"""The blocks of a recipe, one a stage. A stage's `run` gets its block as `context.config`.

Own fields are described here; a stage that trains also takes any setting of its TRL or
transformers arguments class under that class's own name (`extra="allow"`, checked against the
installed class by trainer_fields.py). Fields marked `runtime()` cannot change a result and are no
part of the identity.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def runtime(default: Any = ..., **kwargs: Any) -> Any:
    """A field that cannot change the result: no part of the identity."""
    return Field(default, json_schema_extra={"identity": False}, **kwargs)


class Settings(BaseModel):
    """A frozen block of the recipe; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, defer_build=True, allow_inf_nan=False
    )


class LoraSettings(Settings):
    """LoRA (Hu et al. 2021) through PEFT; merged into the weights before they are stored."""

    r: int = Field(16, ge=1, description="Rank.")
    alpha: int = Field(32, ge=1, description="Scale is alpha / r.")
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: str | list[str] = Field("all-linear", description="As in peft.LoraConfig.")
    quantize_base: Literal["none", "nf4"] = Field(
        "none", description="nf4: QLoRA (Dettmers et al. 2023), needs bitsandbytes and a GPU."
    )


class StageSettings(Settings):
    """What every stage can say: switched off, imported or pinned."""

    enabled: bool = Field(True, description="false: the stage hands its input on.")
    pin: str | None = Field(
        None, description="Take this artifact hash; cuts the edge to what stands above."
    )


class CheckpointSettings(Settings):
    """In-training saves. No part of the identity."""

    every_steps: int | None = runtime(None, ge=1, description="A full save each N steps.")
    every_minutes: Annotated[float, Field(gt=0)] | Literal["auto"] | None = runtime(
        10.0, description="A full save each N minutes; `auto`: by save time and mtbf_hours."
    )
    mtbf_hours: float = runtime(24.0, gt=0, description="Mean time between failures, for `auto`.")
    light_every_steps: int | None = runtime(
        None, ge=1, description="A light save (weights and metrics) each N steps."
    )
    keep: int = runtime(2, ge=1, description="Newest full saves that are kept.")
    keep_light: int = runtime(2, ge=1, description="Newest light saves that are kept.")
    keep_best: int = runtime(0, ge=0, description="Best full saves that are kept, by best_by.")
    keep_every_steps: int | None = runtime(
        None, ge=1, description="Saves of steps that this divides are kept."
    )
    best_by: dict[str, Literal["min", "max"]] = runtime(
        default_factory=lambda: {"loss": "min"},
        description="Metrics of a save, and which end is good; several: by the mean rank.",
    )
    on_save_error: Literal["continue", "stop"] = runtime(
        "continue", description="When a save cannot be written."
    )
    on_no_healthy_save: Literal["stop", "restart"] = runtime(
        "stop", description="When saves were published and none is healthy."
    )
    partial: Literal["refuse", "restore"] = runtime(
        "refuse",
        description="When the newest save has whole weights and damaged parts: take the healthy "
        "one before, or restore what is whole and start the rest anew.",
    )
    upload: bool = runtime(
        True,
        description="When the store is S3, copy each full save that is proved healthy into it: a "
        "lost machine does not lose it.",
    )


class ImportSettings(Settings):
    """A checkpoint made elsewhere: a safetensors folder, a GGUF file, or a hub name."""

    path: str | None = Field(None, description="Folder with safetensors, or a .gguf file.")
    hub: str | None = Field(None, description="Name on the Hugging Face hub.")
    revision: str | None = Field(None, description="Commit of the hub repository.")


class TrainSettings(StageSettings):
    """Common to what trains. Other settings of the trainer's class go by their own names."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, defer_build=True)

    learning_rate: float = Field(..., gt=0, description="Peak learning rate.")
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps; or num_train_epochs.")
    num_train_epochs: float | None = Field(None, gt=0)
    per_device_train_batch_size: int = Field(8, ge=1, description="Rows of one forward pass.")
    gradient_accumulation_steps: int = Field(1, ge=1)
    lr_scheduler_type: str = Field("cosine", description="transformers' name of the schedule.")
    warmup_ratio: float = Field(0.05, ge=0, lt=1, description="Share of the steps.")
    weight_decay: float = Field(0.0, ge=0)
    adam_beta2: float = Field(0.999, gt=0, lt=1)
    max_grad_norm: float = Field(1.0, ge=0)
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16: weights stay float32, autocast in bfloat16."
    )
    import_: ImportSettings | None = Field(
        None, alias="import", description="Take a checkpoint made elsewhere instead of training."
    )
    checkpoint: CheckpointSettings = runtime(
        default_factory=CheckpointSettings, description="In-training saves."
    )

    @property
    def extra(self) -> dict[str, Any]:
        """Settings that are passed through to the trainer's arguments class by name."""
        return dict(self.model_extra or {})


class VocabularySettings(StageSettings):
    """Stage 1: byte-level BPE, trained by the `tokenizers` library."""

    size: int = Field(2048, ge=300, description="Number of tokens, special tokens included.")
    min_frequency: int = Field(2, ge=1)


class TokenizerSettings(StageSettings):
    """Stage 2: special tokens and chat template around the vocabulary."""

    chat_template: str = Field(
        "chatml", description="`chatml`, or the text of a Jinja template with generation marks."
    )
    model_max_length: int = Field(512, ge=16, description="Tokens.")


class ShardsSettings(StageSettings):
    """Stage 3: deduplicated, tokenized and packed corpus."""

    sequence_length: int = Field(256, ge=16, description="Tokens of a packed row.")
    shard_tokens: int = Field(1_000_000, ge=1000, description="Tokens of one shard file.")
    held_out: float = Field(0.02, gt=0, lt=0.5, description="Share of the documents held out.")
    dedup: Literal["none", "exact", "minhash"] = "minhash"
    minhash_threshold: float = Field(0.85, gt=0, le=1, description="Jaccard, word 5-grams.")
    minhash_permutations: int = Field(128, ge=16)


class ModelSettings(Settings):
    """A Llama architecture built from the recipe."""

    hidden_size: int = Field(128, ge=16)
    num_hidden_layers: int = Field(4, ge=1)
    num_attention_heads: int = Field(4, ge=1)
    num_key_value_heads: int = Field(4, ge=1)
    intermediate_size: int = Field(384, ge=16)
    max_position_embeddings: int = Field(512, ge=16, description="Tokens.")
    rope_theta: float = Field(10_000.0, gt=0)
    tie_word_embeddings: bool = True


class BaseSettings(TrainSettings):
    """Stage 4: pre-training from the recipe, or an imported checkpoint."""

    learning_rate: float = Field(1e-3, gt=0)
    model: ModelSettings | None = Field(None, description="Architecture, when trained here.")


class MidtrainSettings(TrainSettings):
    """Stage 5: the annealing pass on the same shards, at a rate that decays to zero."""

    learning_rate: float = Field(3e-4, gt=0)
    lr_scheduler_type: str = "linear"


class SftSettings(TrainSettings):
    """Stage 6: supervised fine-tuning, TRL's SFTTrainer, loss on the assistant's turns only."""

    learning_rate: float = Field(5e-4, gt=0)
    max_length: int = Field(256, ge=16, description="Tokens of a conversation.")
    too_long: Literal["drop", "truncate"] = Field("drop", description="Rows over max_length.")
    lora: LoraSettings | None = None
    eval_prompts: int = Field(200, ge=1, description="Held-out prompts that the metrics use.")
    eval_max_new_tokens: int = Field(64, ge=1, description="Tokens of an answer to one of them.")


class RewardSettings(TrainSettings):
    """Stage 7: Bradley-Terry reward model, TRL's RewardTrainer."""

    learning_rate: float = Field(3e-4, gt=0)
    max_length: int = Field(256, ge=16)
    too_long: Literal["drop", "truncate"] = "drop"
    lora: LoraSettings | None = None
    center_rewards_coefficient: float | None = Field(0.01, ge=0)


class DpoSettings(TrainSettings):
    """Stage 8: direct preference optimization (Rafailov et al. 2023), TRL's DPOTrainer."""

    learning_rate: float = Field(5e-5, gt=0)
    max_length: int = Field(256, ge=16)
    too_long: Literal["drop", "truncate"] = "drop"
    beta: float = Field(0.1, gt=0, description="Strength of the KL to the reference.")
    lora: LoraSettings | None = None
    eval_prompts: int = Field(200, ge=1, description="Held-out prompts that the metrics use.")
    eval_max_new_tokens: int = Field(64, ge=1, description="Tokens of an answer to one of them.")


class RefineSettings(TrainSettings):
    """Stage 9: GRPO or RLOO against the reward model, or constitutional critique and revision."""

    learning_rate: float = Field(2e-5, gt=0)
    method: Literal["grpo", "rloo", "constitutional"] = "grpo"
    beta: float = Field(0.04, gt=0, description="KL penalty to the DPO policy.")
    num_generations: int = Field(8, ge=2, description="Answers for each prompt.")
    max_completion_length: int = Field(48, ge=4, description="Tokens.")
    max_length: int = Field(256, ge=16, description="Tokens of a prompt with its answer.")
    temperature: float = Field(0.9, gt=0)
    min_reward_agreement: float | None = runtime(
        None,
        gt=0,
        lt=1,
        description="GRPO and RLOO stop when the reward model orders fewer of the pairs of new "
        "answers as the oracle does; needs prompts with a check.",
    )
    lora: LoraSettings | None = None
    constitution: list[str] = Field(
        default_factory=list, description="Principles, for method `constitutional`."
    )
    constitution_prompts: int = Field(
        256, ge=1, description="Prompts that are answered, for method `constitutional`."
    )
    critique_request: str = Field(
        "Look at your answer by this principle: {principle} What is wrong with it?",
        description="Asks for a critique; may hold {principle}, {prompt}, {answer}. One that holds "
        "{answer} stands alone, else it goes on in the conversation. Empty: no critique.",
    )
    revision_request: str = Field(
        "Write a better answer to: {prompt} Write the answer only. {principle}",
        description="Asks for the revision; may hold {critique} too.",
    )
    eval_prompts: int = Field(200, ge=1, description="Held-out prompts that the metrics use.")
    eval_max_new_tokens: int = Field(64, ge=1, description="Tokens of an answer to one of them.")


class EvalSettings(StageSettings):
    """Stage 10: lm-eval on policy and reference, and the KL between them."""

    limit: int | None = Field(None, ge=1, description="Items of each task; all without it.")
    tasks: list[str] = Field(
        default_factory=list, description="lm-eval's own tasks, beside those of the eval data."
    )
    batch_size: int = runtime(64, ge=1, description="Prompts of one forward pass.")
    kl_prompts: int = Field(64, ge=1, description="Prompts on which the KL is measured.")
    max_new_tokens: int = Field(48, ge=1)


class QuantizeSettings(StageSettings):
    """Stage 11: GPTQ (Frantar et al. 2022) through llm-compressor."""

    bits: Literal[4, 8] = 8
    group_size: int = Field(32, ge=8)
    scheme: Literal["W4A16", "W8A16"] | None = Field(None, description="Overrides bits.")
    calibration_rows: int = Field(64, ge=1, description="Conversations of the training split.")
    calibration_length: int = Field(
        256, ge=16, description="Tokens of a row into which the conversations are packed."
    )
    damping: float = Field(0.01, gt=0, description="GPTQ's dampening_frac.")
    ignore: list[str] = Field(
        default_factory=lambda: ["lm_head"], description="Layers that keep their full weights."
    )
    eval_rows: int = Field(200, ge=1, description="Held-out conversations of the perplexity.")
    agreement_prompts: int = Field(100, ge=1, description="Held-out prompts answered by both.")
    safety_prompts: int = Field(
        100, ge=0, description="Held-out prompts whose answer is a refusal, answered by both."
    )
    max_new_tokens: int = Field(48, ge=1)


class ServerSettings(StageSettings):
    """Stage 12: the server spec, proven by a live smoke test."""

    engine: Literal["transformers", "vllm"] = "transformers"
    smoke_prompts: list[str] = Field(
        default_factory=list, description="Questions that it is asked."
    )
    num_smoke_prompts: int = Field(3, ge=1, description="Taken from the evals without any above.")
    max_new_tokens: int = Field(48, ge=1)
    startup_timeout_s: float = runtime(120.0, gt=0)


class ReleaseSettings(StageSettings):
    """The ship decision."""


class StageBlocks(Settings):
    """One block a stage, under the stage's name."""

    vocabulary: VocabularySettings = Field(default_factory=VocabularySettings)
    tokenizer: TokenizerSettings = Field(default_factory=TokenizerSettings)
    shards: ShardsSettings = Field(default_factory=ShardsSettings)
    base_checkpoint: BaseSettings = Field(default_factory=BaseSettings)
    midtrained_checkpoint: MidtrainSettings = Field(default_factory=MidtrainSettings)
    sft_checkpoint: SftSettings = Field(default_factory=SftSettings)
    reward_model: RewardSettings = Field(default_factory=RewardSettings)
    dpo_policy: DpoSettings = Field(default_factory=DpoSettings)
    refined_policy: RefineSettings = Field(default_factory=RefineSettings)
    eval_report: EvalSettings = Field(default_factory=EvalSettings)
    quantized_weights: QuantizeSettings = Field(default_factory=QuantizeSettings)
    inference_server: ServerSettings = Field(default_factory=ServerSettings)
    release: ReleaseSettings = Field(default_factory=ReleaseSettings)
