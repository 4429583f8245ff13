"""What stops a run before money is spent."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llm_assets.cli import app
from llm_assets.costs.budget import budget_log, standing
from llm_assets.costs.ledger import open_attempt
from llm_assets.errors import BudgetError, UserError
from llm_assets.guards import forecast_plan, refusals, stage_money, start_run
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store.protocol import Store
from tests.simulation import simulate
from tests.test_recipe import changed, write

Loader = Callable[..., Recipe]


@pytest.fixture
def recipe(tmp_path: Path) -> Loader:
    def load(**change: Any) -> Recipe:
        return load_recipe(
            write(tmp_path, changed({k.replace("__", "."): v for k, v in change.items()}))
        )

    return load


def total(recipe: Recipe, store: Store) -> float:
    return forecast_plan(make_plan(recipe, store), store).cost_usd


def test_a_budget_just_under_the_estimate_refuses(store: Store, recipe: Loader) -> None:
    whole = total(recipe(), store)
    enough = recipe(budget__limit_usd=whole * 1.001)
    plan = make_plan(enough, store)
    assert refusals(plan, store, forecast_plan(plan, store)) == []
    short = recipe(budget__limit_usd=whole * 0.999)
    plan = make_plan(short, store)
    (text,) = refusals(plan, store, forecast_plan(plan, store))
    for part in (
        "budget of campaign small",
        "base_checkpoint",
        "over the",
        "what fits",
        "budget set",
    ):
        assert part in text
    assert budget_log(store, "small") == []


def test_hits_cost_nothing(store: Store, recipe: Loader) -> None:
    simulate(recipe(), store, stop_before="inference_server")
    plan = make_plan(recipe(), store)
    estimates = forecast_plan(plan, store)
    assert set(estimates.estimates) == {"inference_server", "release"}


def test_two_runs_cannot_both_spend_the_last_money(store: Store, recipe: Loader) -> None:
    whole = total(recipe(), store)
    loaded = recipe(budget__limit_usd=whole * 1.5)
    plan = make_plan(loaded, store)
    estimates = forecast_plan(plan, store)
    first = start_run(plan, store, estimates, owner="one")
    with first, pytest.raises(BudgetError, match="reserved by other runs"):
        start_run(plan, store, estimates, owner="two")
    with start_run(plan, store, estimates, owner="two"):
        assert standing(store, "small", whole * 1.5).reserved_usd == pytest.approx(whole)


def test_of_two_run_commands_at_once_one_is_refused(store: Store, recipe: Loader) -> None:
    whole = total(recipe(), store)
    path = recipe(budget__limit_usd=whole * 1.5).path
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "llm_assets.cli", "run", "-r", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    try:
        while not [run for run in runs if run.poll() is not None]:
            time.sleep(0.05)
        (refused,) = [run for run in runs if run.poll() is not None]
        said = refused.communicate()[0]
        assert refused.returncode == 3, said
        assert "reserved by other runs" in said
        (going,) = [run for run in runs if run is not refused]
        assert standing(store, "small", whole * 1.5).reserved_usd > 0
        going.send_signal(signal.SIGINT)
        said = going.communicate()[0]
        assert "interrupted" in said
    finally:
        for run in runs:
            run.kill()
            run.wait()
    # What it had reserved and not spent is free again.
    assert standing(store, "small", None).reserved_usd == 0


def test_a_stage_draws_on_the_runs_reservation(store: Store, recipe: Loader) -> None:
    whole = total(recipe(), store)
    loaded = recipe(budget__limit_usd=whole * 1.5)
    plan = make_plan(loaded, store)
    with (
        start_run(plan, store, forecast_plan(plan, store), owner="run") as made,
        stage_money(plan, "corpus", store, owner="x", reservation=made.name) as money,
    ):
        assert money.reservation == made.name
        assert money.estimate is not None
        assert standing(store, "small", None).reserved_usd == pytest.approx(whole)


def test_a_stage_without_a_run_reserves_for_itself(store: Store, recipe: Loader) -> None:
    loaded = recipe()
    plan = make_plan(loaded, store)
    with stage_money(plan, "corpus", store, owner="x", reservation="gone") as money:
        assert money.reservation not in ("", "gone")
        assert money.estimate is not None
        now = standing(store, "small", None)
        assert now.reserved_usd == pytest.approx(money.estimate.cost_usd)
    assert standing(store, "small", None).reserved_usd == 0
    assert [change.after_usd for change in budget_log(store, "small")] == [10.0]


def spend(store: Store, recipe: Recipe, identity: str, usd: float) -> None:
    """An attempt that cost about `usd` and failed."""
    with (
        pytest.raises(RuntimeError),
        open_attempt(
            store,
            run_id="r",
            stage="corpus",
            pipeline=recipe.pipeline,
            campaign=recipe.campaign,
            identity=identity,
            device="cpu",
            devices=1,
            usd_per_hour=usd * 3600 / 0.05,
            flush_every_s=0,
        ) as attempt,
    ):
        while attempt.spent_usd() < usd:
            pass
        raise RuntimeError


def test_real_spending_counts_before_each_stage(store: Store, recipe: Loader) -> None:
    loaded = recipe(budget__limit_usd=1.0)
    plan = make_plan(loaded, store)
    spend(store, loaded, "another", 1.0)
    with pytest.raises(BudgetError, match="corpus"), stage_money(plan, "corpus", store, owner="x"):
        pass


def test_a_stage_whose_limit_is_spent_does_not_start(store: Store, recipe: Loader) -> None:
    loaded = recipe(budget__stage_limits_usd={"corpus": 0.5})
    plan = make_plan(loaded, store)
    spend(store, loaded, str(plan.stages["corpus"].identity), 0.6)
    (text,) = refusals(plan, store, forecast_plan(plan, store))
    assert "budget.stage_limits_usd.corpus" in text
    error = pytest.raises(BudgetError, match="earlier attempts")
    with error, stage_money(plan, "corpus", store, owner="x"):
        pass


def test_a_model_that_cannot_fit_is_refused(store: Store, recipe: Loader) -> None:
    huge = {"hidden_size": 65536, "num_hidden_layers": 200, "intermediate_size": 262144}
    plan = make_plan(recipe(stages__base_checkpoint__model=huge, budget__limit_usd=1e12), store)
    texts = refusals(plan, store, forecast_plan(plan, store))
    assert any("on each device" in text for text in texts)


def test_a_device_smaller_than_the_table_s_is_refused(store: Store, recipe: Loader) -> None:
    rates = {"device": "h100", "usd_per_hour": 1e-6}
    plan = make_plan(recipe(rates=rates), store)
    assert refusals(plan, store, forecast_plan(plan, store)) == []
    plan = make_plan(recipe(rates={**rates, "memory_gib": 0.01}), store)
    (text,) = refusals(plan, store, forecast_plan(plan, store))
    assert "stages.base_checkpoint" in text
    assert "a h100-sxm has 0.01 GiB" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rates__usd_per_hour": "2.50 EUR"}, "a number of US dollars"),
        ({"rates__usd_per_hour": -1.0}, "greater than or equal to 0"),
        ({"rates__usd_per_hour": float("inf")}, "finite"),
        ({"rates": {"device": "h100"}}, "usd_per_hour: nothing"),
        (
            {"rates": {"device": "h1000", "usd_per_hour": 1.0}},
            r"recipe.yaml: rates.device: unknown",
        ),
        ({"budget__limit_usd": float("nan")}, "budget.limit_usd: nan"),
        ({"budget__limit_usd": float("inf")}, "finite"),
        ({"budget__limit_usd": "10 EUR"}, "a number of US dollars"),
        ({"budget__campaign": ""}, "budget.campaign: ''"),
        ({"budget__campaign": "雪" * 100}, "a name of 100 characters"),
        ({"budget__stage_limits_usd": {"sft": 1.0}}, "unknown stage 'sft'"),
        ({"budget__stage_limits_usd": {"sft_checkpoint": -1.0}}, "more than zero"),
    ],
)
def test_money_that_makes_no_sense_is_an_error_of_the_recipe(
    recipe: Loader, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        recipe(**change)
    assert said in str(caught.value)


def test_plan_and_run_refuse_over_budget(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path, changed({"budget.limit_usd": 1e-6}))
    planned = CliRunner().invoke(app, ["plan", "-r", str(path), "--json"], standalone_mode=False)
    assert planned.return_value == 3
    document = json.loads(planned.output)
    assert document["may_start"] is False
    assert "budget of campaign small" in document["refusals"][0]
    assert document["stages"][0]["estimate"]["cost_usd"] > 0
    assert document["totals"]["cost_usd"] == pytest.approx(
        sum(stage["estimate"]["cost_usd"] for stage in document["stages"])
    )
    ran = CliRunner().invoke(app, ["run", "-r", str(path)], standalone_mode=False)
    assert ran.return_value == 3
    assert "what would fit" in ran.output or "nothing fits" in ran.output
    assert not list(store.all_records())


def test_the_plan_says_where_an_estimate_comes_from(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path, changed({}))
    first = CliRunner().invoke(app, ["plan", "-r", str(path)], standalone_mode=False)
    assert "first principles" in first.output
    simulate(load_recipe(path), store, device="cpu")
    changed_path = write(tmp_path, changed({"stages.sft_checkpoint.learning_rate": 0.01}))
    second = CliRunner().invoke(app, ["plan", "-r", str(changed_path)], standalone_mode=False)
    assert "measured: 1 earlier run, off by" in second.output
    assert re.search(r"dpo_policy +\d+\.\d s +5 below", second.output)
    assert re.search(r"release +\d+\.\d s +nothing", second.output)
