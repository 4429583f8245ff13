"""The world and its data: the same everywhere, complete, true, and free of eval items in train."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from llm_assets import village
from llm_assets.data_settings import VillageSettings
from llm_assets.village.preferences import LONG_VENDOR

SETTINGS = VillageSettings()
SMALL = VillageSettings(
    villagers=6, corpus_documents=60, instructions=60, preferences=60, eval_items=10
)
SIZES = [
    SMALL,
    VillageSettings(villagers=4, corpus_documents=10, instructions=10, preferences=10),
    VillageSettings(villagers=500, corpus_documents=50, instructions=50, preferences=50),
    VillageSettings(annotators=3, votes_per_pair=4, corpus_documents=10, instructions=10),
]


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return [row["text"] for row in village.corpus_documents(SETTINGS)]


@pytest.fixture(scope="module")
def instructions() -> list[dict]:
    return list(village.instruction_rows(SETTINGS))


@pytest.fixture(scope="module")
def preferences() -> list[dict]:
    return list(village.preference_rows(SETTINGS))


@pytest.fixture(scope="module")
def eval_items(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("evals")
    return {
        task["name"]: _items(folder, task["name"])
        for task in village.write_eval_tasks(SETTINGS, folder)
    }


def _items(folder: Path, name: str) -> list[dict]:
    text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _user_texts(rows: Iterable[dict], key: str) -> list[str]:
    return [m["content"] for row in rows for m in row[key] if m["role"] == "user"]


def _digest(settings: VillageSettings) -> str:
    rows = [
        list(village.corpus_documents(settings)),
        list(village.instruction_rows(settings)),
        list(village.preference_rows(settings)),
    ]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def test_another_process_with_another_hash_seed_writes_the_same_bytes() -> None:
    code = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "from test_village_world import SMALL, _digest; print(_digest(SMALL))"
    )
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", code, str(here.parent.parent), str(here)],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == _digest(SMALL)


def test_importing_the_village_imports_nothing_heavy() -> None:
    code = (
        "import sys, llm_assets.village\n"
        "heavy = {'torch', 'transformers', 'numpy', 'lm_eval', 'dagster'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_another_seed_gives_another_village() -> None:
    other = SMALL.model_copy(update={"seed": SMALL.seed + 1})
    first = {fact.key: fact.value for fact in village.village_world(SMALL).facts}
    second = {fact.key: fact.value for fact in village.village_world(other).facts}
    assert first.keys() == second.keys()
    assert first != second


@pytest.mark.parametrize("settings", SIZES)
def test_counts_are_those_of_the_settings_at_any_size(
    settings: VillageSettings, tmp_path: Path
) -> None:
    assert len(list(village.corpus_documents(settings))) == settings.corpus_documents
    rows = list(village.instruction_rows(settings))
    assert len(rows) == settings.instructions
    assert {row["split"] for row in rows} == {"train", "held_out"}
    assert len(list(village.preference_rows(settings))) == settings.preferences
    tasks = village.write_eval_tasks(settings, tmp_path)
    assert all(0 < task["num_items"] <= settings.eval_items for task in tasks)


def test_every_villager_has_one_value_of_each_attribute_and_no_word_means_two_things() -> None:
    world = village.village_world(VillageSettings(villagers=500))
    assert len(set(world.names)) == 500
    pets = [person["pet_name"] for person in world.villagers]
    assert len(set(pets)) == 500
    assert not set(pets) & set(world.names)
    assert all(person["friend"] != person["n"] for person in world.villagers)
    for fact in world.facts:
        assert fact.value not in fact.others
        assert fact.slots.get("n") not in fact.others


def test_the_corpus_says_every_fact_in_several_ways(corpus: list[str]) -> None:
    texts = set(corpus)
    for fact in village.village_world(SETTINGS).facts:
        name = fact.slots.get("n", "")
        documents = sum(name in text and fact.value in text for text in texts)
        assert documents >= 20, fact.key


def test_the_corpus_has_exact_and_near_copies(corpus: list[str]) -> None:
    counts = Counter(corpus)
    assert sum(count - 1 for count in counts.values()) >= 0.03 * len(corpus)
    near = [text for text in counts if text.rsplit(". ", 1)[0] + "." in counts]
    assert len(near) >= 0.03 * len(corpus)


def test_no_eval_prompt_is_seen_in_training(
    corpus: list[str],
    instructions: list[dict],
    preferences: list[dict],
    eval_items: dict[str, list[dict]],
) -> None:
    train = [row for row in instructions if row["split"] == "train"]
    pairs = [row for row in preferences if row["split"] == "train"]
    seen = corpus + _user_texts(train, "messages") + _user_texts(pairs, "prompt")
    text = " | ".join(f" {village.normalize(line)} " for line in dict.fromkeys(seen))
    prompts = [item["prompt"] for items in eval_items.values() for item in items]
    assert len(prompts) > 800
    found = [prompt for prompt in prompts if f" {village.normalize(prompt)} " in text]
    assert found == []
    # The check can see: a training prompt is found in the same way.
    assert f" {village.normalize(_user_texts(train, 'messages')[0])} " in text


def test_held_out_prompts_are_neither_in_train_nor_in_the_evals(
    instructions: list[dict], preferences: list[dict], eval_items: dict[str, list[dict]]
) -> None:
    evals = {village.normalize(i["prompt"]) for items in eval_items.values() for i in items}
    for rows, key in ((instructions, "messages"), (preferences, "prompt")):
        by_split: dict[str, set[str]] = {"train": set(), "held_out": set()}
        for row in rows:
            if len(row[key]) <= 2:
                by_split[row["split"]].add(village.normalize(row[key][0]["content"]))
        assert not by_split["train"] & by_split["held_out"]
        assert not by_split["held_out"] & evals


def test_sums_are_asked_in_new_words(
    instructions: list[dict], eval_items: dict[str, list[dict]]
) -> None:
    train = {
        village.normalize(row["messages"][0]["content"])
        for row in instructions
        if row["split"] == "train" and row["kind"] == "sum"
    }
    asked = {village.normalize(item["prompt"]) for item in eval_items["village_sums"]}
    assert train
    assert asked
    assert not train & asked


def test_instructions_are_true_in_every_tone(instructions: list[dict]) -> None:
    for row in instructions:
        answer = row["messages"][-1]
        assert answer["role"] == "assistant"
        prompt = row["messages"][-2]["content"]
        assert village.score(row["check"], answer["content"], prompt).truth == 1, row
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_instructions_leave_room_in_manners_and_length(instructions: list[dict]) -> None:
    facts = [row for row in instructions if row["kind"] == "fact"]
    scores = [village.score(row["check"], row["messages"][-1]["content"]) for row in facts]
    assert 0.05 < sum(s.manners == 0 for s in scores) / len(scores) < 0.25
    assert 0.05 < sum(s.length < 0.8 for s in scores) / len(scores) < 0.25
    assert 0.1 < sum(s.total == 1 for s in scores) / len(scores) < 0.4


def test_every_kind_of_instruction_is_in_both_splits(instructions: list[dict]) -> None:
    kinds = {split: {r["kind"] for r in instructions if r["split"] == split}
             for split in ("train", "held_out")}  # fmt: skip
    expected = {"fact", "sum", "day", "unsafe", "harmless", "rewrite", "greeting", "turns"}
    assert kinds["held_out"] == expected
    assert kinds["train"] == expected | {"rule"}


def test_the_truly_better_answer_scores_higher(preferences: list[dict]) -> None:
    for row in preferences:
        better, worse = row["chosen"], row["rejected"]
        if row["true_choice"] == "rejected":
            better, worse = worse, better
        good = village.score(row["check"], better[0]["content"])
        bad = village.score(row["check"], worse[0]["content"])
        assert good.total > bad.total, row
        assert good.total > 0.99, row


def test_chosen_is_what_most_votes_are_for(preferences: list[dict]) -> None:
    for row in preferences:
        votes = Counter(vote["choice"] for vote in row["votes"])
        assert len({vote["annotator"] for vote in row["votes"]}) == SETTINGS.votes_per_pair
        assert votes["chosen"] > votes["rejected"]


def test_annotators_err_at_rates_of_their_own(preferences: list[dict]) -> None:
    wrong: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for row in preferences:
        if row["vendor"] == LONG_VENDOR:
            continue
        for vote in row["votes"]:
            total[vote["annotator"]] += 1
            wrong[vote["annotator"]] += vote["choice"] != row["true_choice"]
    rates = sorted(wrong[name] / total[name] for name in total)
    assert len(rates) == SETTINGS.annotators
    assert abs(sum(rates) / len(rates) - SETTINGS.annotator_error) < 0.02
    assert rates[-1] > 2 * rates[0]


def test_one_vendor_has_a_taste_for_long_answers_unless_switched_off(
    preferences: list[dict],
) -> None:
    def wrong_share(rows: list[dict], vendor: str) -> float:
        own = [row for row in rows if row["vendor"] == vendor and row["flaw"] == "long"]
        return sum(row["true_choice"] == "rejected" for row in own) / len(own)

    fair = SETTINGS.model_copy(update={"length_biased_vendor": False})
    assert wrong_share(preferences, LONG_VENDOR) > 0.1
    assert wrong_share(preferences, "hearth") < 0.05
    assert wrong_share(list(village.preference_rows(fair)), LONG_VENDOR) < 0.05


def test_majority_labels_leave_enough_signal(preferences: list[dict]) -> None:
    held = [row for row in preferences if row["split"] == "held_out"]
    assert sum(row["true_choice"] == "chosen" for row in held) / len(held) > 0.92
