from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from llm_assets.costs.expected import expected_info, record_info, stored_metadata, with_metadata
from llm_assets.costs.forecast import check_recipe_memory, forecast
from llm_assets.costs.learning import (
    estimate_stage,
    learned_utilization,
    recorded_work,
)
from llm_assets.costs.parameters import from_config, lora_parameters
from llm_assets.costs.work import (
    STARTUP_S,
    InputsInfo,
    StageWork,
    num_steps,
    stage_work,
)
from llm_assets.errors import RecipeError
from llm_assets.graph import STAGES
from llm_assets.identity import hashed_part
from llm_assets.jobs import PROCESSES, RESUMED
from llm_assets.recipe import RateSettings, load_recipe
from llm_assets.stage_settings import (
    BaseSettings,
    DpoSettings,
    ImportSettings,
    LoraSettings,
    RefineSettings,
    RewardSettings,
    SftSettings,
)
from llm_assets.store import Store
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Record

SHAPE = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
}
ARCHITECTURE = from_config(SHAPE)
INFO = InputsInfo(architecture=ARCHITECTURE, rows=1000, sequence_length=128)
CPU = RateSettings(device="cpu", devices=1, usd_per_hour=0.10)
H100 = RateSettings(device="H100", devices=8, usd_per_hour=2.50)


def sft(**changes: Any) -> SftSettings:
    values = {"max_steps": 100, "per_device_train_batch_size": 32, "max_length": 128, **changes}
    return SftSettings.model_validate(values)


def record(wall_s: float, settings: Any = None, **changes: Any) -> Record:
    """An earlier record of the SFT stage, on one core."""
    values: dict[str, Any] = {
        "identity": Identity.parse("a" * 64),
        "stage": "sft_checkpoint",
        "pipeline": "tiny",
        "output": ArtifactHash.parse("b" * 64),
        "type": "sft_checkpoint",
        "source_hash": "c" * 64,
        "recipe": hashed_part(settings or sft()),
        "seed": 7,
        "inputs": {},
        "metrics": {},
        "cost_usd": 0.0,
        "wall_s": wall_s,
        "created_at": "2026-03-01T10:00:00+00:00",
        "device": "cpu",
    }
    return Record(**{**values, **changes})


def records(*walls: float, **changes: Any) -> list[Record]:
    return [
        record(wall, created_at=f"2026-03-01T10:{number:02d}:00+00:00", **changes)
        for number, wall in enumerate(walls)
    ]


def estimate(settings: Any, earlier: list[Record], rates: RateSettings = CPU) -> Any:
    return estimate_stage("sft_checkpoint", settings, INFO, rates, earlier)


def test_a_record_that_was_resumed_teaches_nothing() -> None:
    part = record(3.0, environment={RESUMED: "1000"})
    assert estimate(sft(), [part]).source == "first principles"
    found = estimate(sft(), [*records(40.0), part])
    assert (found.wall_s, found.num_records) == (40.0, 1)


# What a stage computes.


def test_training_tokens_are_steps_by_batch_by_length() -> None:
    work = stage_work("sft_checkpoint", sft(gradient_accumulation_steps=2), INFO)
    assert work.tokens == 100 * 32 * 2 * 128
    assert work.parts["training"] == 6.0 * ARCHITECTURE.compute * work.tokens


def test_epochs_are_counted_over_the_rows() -> None:
    settings = sft(max_steps=None, num_train_epochs=2.0)
    assert num_steps("sft_checkpoint", settings, 1000) == 2 * 32
    assert num_steps("sft_checkpoint", sft(max_steps=None), 1000) == 3 * 32
    with pytest.raises(RecipeError, match=r"stages\.sft_checkpoint\.num_train_epochs"):
        num_steps("sft_checkpoint", settings, None)


def test_pairs_are_two_rows_and_references_one_pass_more() -> None:
    common = {"max_steps": 10, "per_device_train_batch_size": 4, "max_length": 100}
    reward = stage_work("reward_model", RewardSettings.model_validate(common), INFO)
    dpo = stage_work("dpo_policy", DpoSettings.model_validate(common), INFO)
    assert reward.tokens == dpo.tokens == 10 * 4 * 2 * 100
    assert reward.parts["training"] == 6.0 * ARCHITECTURE.compute_without_head * reward.tokens
    assert dpo.parts["policy"] == 6.0 * ARCHITECTURE.compute * dpo.tokens
    assert dpo.parts["reference"] == 2.0 * ARCHITECTURE.compute * dpo.tokens


def test_lora_costs_less_than_full_tuning_but_not_much() -> None:
    full, lora = (
        stage_work("sft_checkpoint", settings, INFO).parts["training"]
        for settings in (sft(), sft(lora=LoraSettings(r=8, alpha=16)))
    )
    adapters = lora_parameters(ARCHITECTURE, r=8)
    tokens = 100 * 32 * 128
    assert lora == 4.0 * (ARCHITECTURE.compute + adapters) * tokens + 2.0 * adapters * tokens
    assert 0.6 < lora / full < 1.0


def test_refinement_generates_scores_and_trains() -> None:
    settings = RefineSettings(
        max_steps=10, per_device_train_batch_size=16, max_completion_length=32, eval_prompts=1
    )
    info = dataclasses.replace(INFO, prompt_tokens=20.0)
    work = stage_work("refined_policy", settings, info)
    tokens = 10 * 16 * 52
    assert work.tokens == tokens
    assert work.generated["generation"] == 2.0 * ARCHITECTURE.compute * tokens
    assert work.parts["reward"] == 2.0 * ARCHITECTURE.compute_without_head * tokens
    assert work.parts["policy"] == 6.0 * ARCHITECTURE.compute * tokens
    assert work.parts["reference"] == 2.0 * ARCHITECTURE.compute * tokens
    revised = stage_work(
        "refined_policy", settings.model_copy(update={"method": "constitutional"}), info
    )
    assert revised.generated["generation"] == 3 * work.generated["generation"]
    assert "reference" not in revised.parts


def test_generation_is_slower_than_training() -> None:
    dense = StageWork(parts={"a": 1e12})
    decoded = StageWork(generated={"a": 1e12})
    from llm_assets.costs.devices import find_device

    seconds = [
        work.variable_s(find_device("cpu"), utilization=0.4, devices=1) for work in (dense, decoded)
    ]
    assert seconds == [pytest.approx(25.0), pytest.approx(100.0)]
    assert dense.flops == decoded.flops


def test_an_import_costs_its_start_up_only() -> None:
    settings = BaseSettings.model_validate({"import": ImportSettings(path="x")})
    assert stage_work("base_checkpoint", settings, InputsInfo()).flops == 0


def test_what_can_t_be_known_is_said() -> None:
    with pytest.raises(RecipeError, match="number of parameters"):
        stage_work("sft_checkpoint", sft(), InputsInfo())
    with pytest.raises(RecipeError, match=r"shards\.sequence_length"):
        stage_work(
            "midtrained_checkpoint",
            load_recipe("tiny").stages.midtrained_checkpoint,
            InputsInfo(architecture=ARCHITECTURE),
        )
    with pytest.raises(RecipeError, match="unknown stage"):
        stage_work("lunch", None, INFO)


def test_every_stage_of_the_tiny_recipe_has_an_estimate() -> None:
    recipe = load_recipe("tiny")
    assert set(STAGES) == set(STARTUP_S)
    for name, stage in STAGES.items():
        block = getattr(recipe.data, name) if stage.data else getattr(recipe.stages, name)
        found = estimate_stage(name, block, expected_info(recipe, name), recipe.rates)
        assert found.source == "first principles"
        assert found.error_share is None
        assert 0 < found.wall_s < 3600, name
        assert found.cost_usd == pytest.approx(
            found.wall_s / 3600 * recipe.rates.usd_per_hour * recipe.rates.devices
        )
        assert (found.flops > 0) == (stage.number >= 4 and name != "release"), name


# What is known of the inputs.


def test_the_recipe_tells_the_model_and_the_rows() -> None:
    recipe = load_recipe("tiny")
    info = expected_info(recipe, "sft_checkpoint")
    village = recipe.data.village
    assert info.architecture is not None
    assert info.architecture.vocabulary_size == recipe.stages.vocabulary.size
    held_out = recipe.data.instructions.held_out
    assert info.rows == round(village.instructions * (1 - held_out))
    assert expected_info(recipe, "corpus").rows == village.corpus_documents
    assert expected_info(recipe, "base_checkpoint").rows is None


def test_artifacts_correct_what_the_recipe_expects() -> None:
    found = with_metadata(
        INFO,
        {
            "instructions": {"num_rows": 120, "num_train": 100, "num_held_out": 20},
            "shards": {"num_tokens": 1_280_000, "sequence_length": 256},
            "midtrained_checkpoint": {"num_parameters": ARCHITECTURE.total},
        },
    )
    assert (found.rows, found.sequence_length) == (5000, 256)
    assert found.architecture == ARCHITECTURE
    other = with_metadata(INFO, {"sft_checkpoint": {"num_parameters": 135_000_000}})
    assert other.architecture is None
    assert other.compute("here") == 135_000_000


def test_metadata_is_read_from_the_store(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "documents.jsonl").write_text('{"text": "a", "source": "b"}\n')
    artifact = store.put(folder, type="corpus", metadata={"num_rows": 1})
    inputs = {"corpus": str(artifact), "gone": "f" * 64, "all.odd": "no hash"}
    assert stored_metadata(store, inputs) == {"corpus": {"num_rows": 1}}
    assert record_info(store, record(1.0, inputs=inputs), INFO).rows == 1


# What earlier records teach.


def test_without_records_first_principles() -> None:
    found = estimate(sft(), [])
    work = stage_work("sft_checkpoint", sft(), INFO)
    assert found.wall_s == pytest.approx(
        work.startup_s
        + (sum(work.parts.values()) + 4 * sum(work.generated.values())) / (0.1e12 * 0.4)
    )
    assert found.utilization == 0.4


def test_the_same_again_takes_what_it_took() -> None:
    found = estimate(sft(), records(50.0, 40.0, 42.0))
    assert found.wall_s == 42.0
    assert found.source == "measured: 3 earlier runs"
    assert found.num_records == 3
    # 40 was estimated as 50; 42 as the median of 50 and 40.
    assert found.error_share == pytest.approx((10 / 40 + 3 / 42) / 2)
    one = estimate(sft(), records(50.0))
    assert one.source == "measured: 1 earlier run"
    assert one.error_share == pytest.approx(abs(estimate(sft(), []).wall_s - 50) / 50)


def test_more_work_takes_longer_but_start_up_stays() -> None:
    # Without work the stage takes 30 s; 100 steps take 20 s on top.
    doubled = estimate(
        sft(max_steps=200, eval_prompts=1), records(50.0, settings=sft(eval_prompts=1))
    )
    assert 50 < doubled.wall_s < 100
    earlier = [
        record(50.0, sft(max_steps=100, eval_prompts=1)),
        record(110.0, sft(max_steps=400, eval_prompts=1)),
    ]
    line = estimate(sft(max_steps=200, eval_prompts=1), earlier)
    assert line.wall_s == pytest.approx(70.0, rel=0.02)
    large = estimate(sft(max_steps=4000, eval_prompts=1), earlier)
    assert large.wall_s == pytest.approx(830.0, rel=0.02)


def test_noise_never_makes_a_coefficient_negative() -> None:
    earlier = [record(60.0, sft(max_steps=100)), record(20.0, sft(max_steps=400))]
    for steps in (1, 100, 10_000):
        assert estimate(sft(max_steps=steps), earlier).wall_s > 0
    tiny = estimate(sft(max_steps=100_000), records(5.0))
    assert tiny.wall_s > 5.0


def test_only_this_stage_on_this_device_teaches() -> None:
    others = [
        record(999.0, stage="dpo_policy"),
        record(999.0, device="8 x h100-sxm"),
        record(999.0, device=""),
        record(0.0),
    ]
    assert estimate(sft(), others).source == "first principles"
    assert estimate(sft(), [*others, record(40.0)]).wall_s == 40.0


def test_old_records_fade() -> None:
    found = estimate(sft(), records(*([500.0] * 10), *([40.0] * 12)))
    assert (found.wall_s, found.num_records) == (40.0, 12)


def test_more_devices_divide_the_work_of_a_record() -> None:
    earlier = [record(3600.0, sft(max_steps=100_000), device="8 x h100-sxm")]
    half = H100.model_copy(update={"devices": 4})
    settings = sft(max_steps=200_000)  # half the batch a step, so the same tokens
    found = estimate_stage("sft_checkpoint", settings, INFO, half, earlier)
    assert found.wall_s > 3600
    assert found.cost_usd == pytest.approx(found.wall_s / 3600 * 4 * 2.5)


def test_devices_without_a_process_are_paid_and_idle() -> None:
    settings = sft(max_steps=1_000_000)
    all_eight = estimate_stage("sft_checkpoint", settings, INFO, H100, processes=8)
    one = estimate_stage("sft_checkpoint", settings, INFO, H100, processes=1)
    assert (one.tokens, one.flops) == (all_eight.tokens, all_eight.flops)
    startup = stage_work("sft_checkpoint", settings, INFO).startup_s
    assert one.wall_s - startup == pytest.approx(8 * (all_eight.wall_s - startup))
    assert one.gpu_hours == pytest.approx(8 * one.wall_s / 3600)
    # What one process of eight devices took teaches what eight will take.
    earlier = [record(one.wall_s, settings, device="8 x h100-sxm", environment={PROCESSES: "1"})]
    taught = estimate_stage("sft_checkpoint", settings, INFO, H100, earlier, processes=8)
    assert taught.wall_s == pytest.approx(all_eight.wall_s, rel=0.01)
    cores = CPU.model_copy(update={"devices": 2})
    by_processes = [
        estimate_stage("sft_checkpoint", settings, INFO, cores, processes=n) for n in (1, 2)
    ]
    assert by_processes[0].wall_s == by_processes[1].wall_s


def test_unknown_work_repeats_what_was_measured() -> None:
    settings = sft(max_steps=None, num_train_epochs=1.0)
    info = dataclasses.replace(INFO, rows=None)
    with pytest.raises(RecipeError):
        estimate_stage("sft_checkpoint", settings, info, CPU)
    found = estimate_stage("sft_checkpoint", settings, info, CPU, records(40.0, 44.0))
    assert found.wall_s == 42.0
    assert found.error_share == pytest.approx(4 / 44)


def test_a_record_that_can_t_be_read_counts_as_the_same_work() -> None:
    strange = record(40.0, recipe={"learning_rate": "fast"})
    assert recorded_work(strange, INFO) is None
    assert estimate(sft(), [strange]).wall_s == 40.0


def test_a_caller_that_knows_the_work_of_a_record_is_asked() -> None:
    asked = []

    def work_of(entry: Record) -> StageWork:
        asked.append(entry)
        return stage_work("sft_checkpoint", sft(max_steps=50), INFO)

    found = estimate_stage(
        "sft_checkpoint", sft(max_steps=100), INFO, CPU, records(40.0), work_of=work_of
    )
    assert len(asked) == 1
    assert found.wall_s > 40.0


def test_utilization_is_learned_where_operations_are_counted() -> None:
    walls = [
        record(10.0, flops=0.4e12, created_at="1"),
        record(10.0, flops=0.5e12, created_at="2"),
        record(20.0, flops=1.2e12, created_at="3", device="2 x cpu"),
        record(10.0, created_at="4"),
    ]
    found = learned_utilization(walls, "sft_checkpoint", "cpu")
    assert found is not None
    value, number, spread = found
    assert (value, number) == (pytest.approx(0.4), 3)
    assert spread == pytest.approx(0.25, abs=0.01)
    assert learned_utilization(walls, "sft_checkpoint", "H100") is None
    assert learned_utilization(walls, "dpo_policy", "cpu") is None


def test_operations_of_the_tokens_that_were_really_trained() -> None:
    work = stage_work("sft_checkpoint", sft(), INFO)
    assert work.flops_of(work.tokens // 2) == pytest.approx(work.flops / 2)
    assert work.flops_of(0) == work.flops


def test_an_imported_model_is_counted_where_it_can_be_read(tmp_path: Path) -> None:
    import json

    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(SHAPE))
    recipe = load_recipe("tiny")
    base = recipe.stages.base_checkpoint

    def imported(path: str) -> InputsInfo:
        block = base.model_copy(update={"model": None, "import_": ImportSettings(path=path)})
        stages = recipe.stages.model_copy(update={"base_checkpoint": block})
        here = recipe.model_copy(update={"stages": stages, "path": tmp_path / "recipe.yaml"})
        return expected_info(here, "sft_checkpoint")

    assert imported("base").architecture == ARCHITECTURE
    assert imported(str(tmp_path / "base")).architecture == ARCHITECTURE
    for unreadable in ("nothing", "nothing.gguf", "${NOT_SET_ANYWHERE}"):
        info = imported(unreadable)
        assert (info.architecture, info.num_parameters) == (None, None)


def test_an_imported_checkpoint_says_nothing_about_training_one() -> None:
    trained = load_recipe("tiny").stages.base_checkpoint
    taken = record(3.0, stage="base_checkpoint", recipe={"import": {"hub": "x", "revision": "y"}})
    found = estimate_stage("base_checkpoint", trained, INFO, CPU, [taken])
    assert found.source == "first principles"
    block = trained.model_copy(update={"model": None, "import_": ImportSettings(path="x")})
    again = estimate_stage("base_checkpoint", block, INFO, CPU, [taken])
    assert (again.wall_s, again.num_records) == (3.0, 1)


def test_a_forecast_of_a_rerun_set(store: Store, tmp_path: Path) -> None:
    recipe = load_recipe("tiny")
    earlier = [
        record(40.0, recipe.stages.sft_checkpoint),
        record(400.0, recipe.stages.sft_checkpoint, pipeline="other"),
        record(70.0, recipe.stages.dpo_policy, stage="dpo_policy", pipeline="other"),
    ]
    names = {"sft_checkpoint": {}, "dpo_policy": {}, "release": {}}
    found = forecast(recipe, store, names, earlier)
    assert list(found.estimates) == list(names)
    assert found.estimates["sft_checkpoint"].wall_s == 40.0
    assert found.estimates["dpo_policy"].wall_s == 70.0
    assert found.wall_s == pytest.approx(110.0 + STARTUP_S["release"])
    assert sum(found.by_stage_usd.values()) == pytest.approx(found.cost_usd)
    assert found.unknown == {}


def test_a_forecast_says_what_it_can_t_know(store: Store) -> None:
    recipe = load_recipe("tiny")
    block = recipe.stages.base_checkpoint.model_copy(
        update={"model": None, "import_": ImportSettings(hub="a/b", revision="c" * 40)}
    )
    stages = recipe.stages.model_copy(update={"base_checkpoint": block})
    hub = recipe.model_copy(update={"stages": stages})
    found = forecast(hub, store, {"base_checkpoint": {}, "sft_checkpoint": {}}, [])
    assert list(found.estimates) == ["base_checkpoint"]
    assert "number of parameters" in found.unknown["sft_checkpoint"]


def test_a_recipe_that_can_t_fit_is_refused_before_it_starts() -> None:
    recipe = load_recipe("tiny")
    check_recipe_memory(recipe, STAGES)
    small = recipe.rates.model_copy(update={"memory_gib": 0.1})
    with pytest.raises(RecipeError, match=r"(?s)stages\.base_checkpoint.*a cpu has 0\.1 GiB"):
        check_recipe_memory(recipe.model_copy(update={"rates": small}), STAGES)
