"""What the cache report becomes on the screen: bars, trees, gauges and words. Pure functions."""

from __future__ import annotations

import pytest
from fake_service import cache_state, chain
from hypothesis import given
from hypothesis import strategies as st

from chatkv.app.tui.cache_records import CacheReport, Miss
from chatkv.app.tui.json_fields import mapping
from chatkv.app.tui.records import ReplyStats
from chatkv.app.tui.render.cache_tree import MAX_DEPTH, SORTS, chain_rows
from chatkv.app.tui.render.chain_row import columns, titles
from chatkv.app.tui.render.chat_rows import kept_rows
from chatkv.app.tui.render.forgotten import cached_gone
from chatkv.app.tui.render.kv_bar import bar_cells, first_blocks, kv_bar, skip_blocks, tier_word
from chatkv.app.tui.render.palette import ASCII_GLYPHS, Glyphs, Palette
from chatkv.app.tui.render.proof import proof_text, why_computed
from chatkv.app.tui.render.tier_lines import model_words, tier_lines
from chatkv.app.tui.render.width import cell_len

RUNS = st.lists(st.tuples(st.sampled_from(["device", "host", "disk", "missing"]), st.integers(1, 5000)), max_size=12)


def report(*chats, **fields) -> CacheReport:
    return CacheReport.from_json(cache_state(*chats, **fields))


def drawn(runs) -> str:
    return "".join(text for text, _ in runs)


@given(RUNS, st.integers(0, 60))
def test_a_bar_has_exactly_its_cells_and_shows_every_tier_that_fits(runs, num_cells):
    bar = kv_bar(runs, num_cells, Glyphs())
    assert cell_len(drawn(bar)) == num_cells
    tiers = {tier for tier, _ in runs}
    if tiers and num_cells >= len(tiers):
        assert {tier for text, tier in bar if text} == tiers, "a tier that holds one block is not left out"


@given(RUNS, st.integers(0, 20_000))
def test_the_head_and_the_rest_are_the_whole_chain(runs, num_blocks):
    total = sum(count for _, count in runs)
    head = sum(count for _, count in first_blocks(runs, num_blocks))
    rest = sum(count for _, count in skip_blocks(runs, num_blocks))
    assert (head, rest) == (min(total, num_blocks), max(0, total - num_blocks))


def test_bars_keep_the_order_and_the_proportion_of_the_blocks():
    assert drawn(kv_bar([("device", 50), ("disk", 30), ("missing", 20)], 10, Glyphs())) == "█████░░░··"
    assert drawn(kv_bar([("device", 1), ("host", 9998), ("device", 1)], 8, ASCII_GLYPHS)) == "#======#"
    assert bar_cells(1, 100_000, 30) == 1
    assert bar_cells(0, 10, 30) == 0


def test_on_a_cpu_the_device_is_not_called_a_gpu():
    assert [tier_word(tier, "cpu") for tier in ("device", "host", "disk")] == ["pool", "RAM", "disk"]
    assert tier_word("device", "cuda:0") == "GPU"


def tree(*chats, **fields) -> list[str]:
    rows = chain_rows(report(*chats, **fields), "last use", 100.0, Glyphs())
    return [f"{row.lead}{row.label} {sum(count for _, count in row.kept)}" for row in rows]


def head(num_blocks: int, label: str, *chat_ids: str) -> dict[str, object]:
    return {"num_blocks": num_blocks, "num_tokens": 16 * num_blocks, "label": label, "chat_ids": list(chat_ids)}


def test_shared_heads_are_drawn_once_above_their_chats_and_in_one_another():
    a, b, c, d = (chain(name, name, ("device", 50), last_used_at=9 - at) for at, name in enumerate("abcd"))
    heads = [head(30, "tools", "a", "b"), head(20, "system", "a", "b", "c")]
    assert tree(a, b, c, d, shared=heads) == [
        "system 20",
        "├ tools 10",
        "│ ├ a 20",
        "│ └ b 20",
        "└ c 30",
        "d 50",
    ]


def test_heads_that_cross_lose_no_chat_and_draw_none_twice():
    a, b, c = (chain(name, name, ("device", 50)) for name in "abc")
    rows = tree(a, b, c, shared=[head(10, "x", "a", "b"), head(20, "y", "b", "c"), head(5, "z", "gone", "a")])
    for name in "abc":
        assert sum(row.split()[-2] == name for row in rows) == 1
    assert not any("z" in row for row in rows), "one chat shares with nobody"


def test_many_heads_in_one_another_still_leave_room_for_the_names():
    chats = [chain(str(number), f"chat {number}", ("device", 100)) for number in range(30)]
    heads = [head(number + 1, f"head {number}", *map(str, range(number, 30))) for number in range(29)]
    rows = chain_rows(report(*chats, shared=heads), "last use", 100.0, Glyphs())
    assert [row.num_chats for row in rows if row.chat_id is None] == list(range(30, 30 - MAX_DEPTH, -1))
    assert len({row.chat_id for row in rows}) == 31
    for row in rows:
        assert cell_len(drawn(row.runs(74, Palette()))) == 74


def test_each_sort_has_its_own_first():
    chats = [
        chain("new", "new", ("device", 1), last_used_at=90, resume_s=0, compute_s=0.1),
        chain("long", "long", ("device", 900), last_used_at=10, resume_s=5, compute_s=6),
        chain("dear", "dear", ("device", 100), last_used_at=20, resume_s=0.1, compute_s=30),
    ]
    firsts = [chain_rows(report(*chats), sort, 100.0, Glyphs())[0].label for sort in SORTS]
    assert firsts == ["new", "long", "dear"]


@pytest.mark.parametrize("width", [30, 48, 70, 74, 112, 150])
@pytest.mark.parametrize("is_ascii", [False, True])
def test_a_row_is_exactly_as_wide_as_the_list(width, is_ascii):
    palette = Palette(glyphs=ASCII_GLYPHS if is_ascii else Glyphs())
    chats = [
        chain("a", "東京の天気について", ("device", 50), ("disk", 20), is_running=True, is_pinned=True),
        chain("b", "a title that is longer than any column for it could ever be", ("missing", 900), num_damaged=4),
        chain("c", "c", resume_s=None, compute_s=None, is_private=True),
    ]
    rows = chain_rows(report(*chats, shared=[head(10, "system", "a", "b")]), "tokens", 100.0, palette.glyphs)
    assert len(rows) == 4
    for row in rows:
        assert cell_len(drawn(row.runs(width, palette))) == width
    assert len(titles(width)) == width
    assert sum(columns(width)) == width
    if is_ascii:
        text = "".join(drawn(row.runs(width, palette)) for row in rows[2:])
        assert not set("█▓░▾├└★○…") & set(text)


def test_rows_are_the_same_while_nothing_that_is_shown_changes():
    chats = [chain("a", "a", ("device", 3), last_used_at=40.0)]
    first, second = (chain_rows(report(*chats), "last use", now, Glyphs()) for now in (100.0, 101.0))
    assert first == second


def test_the_list_says_where_a_chat_lies_and_what_that_saves():
    kept = kept_rows(
        report(
            chain("here", "a", ("device", 10)),
            chain("below", "b", ("disk", 1550)),
            chain("mixed", "c", ("device", 5), ("disk", 5)),
            chain("part", "d", ("disk", 5), ("missing", 5)),
            chain("busy", "e", ("disk", 5), is_running=True),
            chain("none", "f"),
        ),
        "cpu",
        Palette(),
    )
    words = {chat_id: [row.label.strip() for row in rows] for chat_id, rows in kept.items()}
    assert words == {
        "here": ["pool"],
        "below": ["disk", "resume ~0.9 s (else 15 s)"],
        "mixed": ["pool+disk", "resume ~0.9 s (else 15 s)"],
        "part": ["part", "resume ~0.9 s (else 15 s)"],
        "busy": ["disk"],
    }
    assert drawn(kept["below"][0].runs(31, Palette())) == "    ░░░░░░░░ disk     24.8k tok"


def lines(width: int = 114, **disk) -> list[str]:
    state = cache_state()
    state["tiers"]["disk"] |= disk
    return [drawn(line) for line in tier_lines(CacheReport.from_json(state), "cpu", width, Palette())]


def test_gauges_tell_how_full_a_tier_is_and_what_it_is_worth():
    pool, disk = lines()
    assert pool == "pool  ██████████████··  1.9/2.2 GB     2,577 blocks · 24 h 91 % of prompts"
    assert disk.startswith("disk  ░░░░············  11/40 GB       6,120 blocks · 24 h 4 % of prompts")
    assert disk.endswith("1.2 GB written today · reads 1.4 GB/s")
    assert all(cell_len(line) <= 74 for line in lines(74))


@pytest.mark.parametrize(("state", "word"), [("off", "off"), ("memory_only", "memory only")])
def test_a_disk_that_keeps_nothing_says_so_and_why(state, word):
    assert lines(state=state, notice="The store is used by another home.")[1:] == [
        f"disk  {word}",
        "The store is used by another home.",
    ]


def test_what_the_disk_holds_for_other_models_is_named():
    slabs = [
        {"model": "smollm2-135m, fp32 KV", "num_blocks": 9, "bytes": 5e9, "is_open": True},
        {"model": "qwen3-4b, fp32 KV", "bytes": 6e9},
    ]
    assert lines(slabs=slabs)[2:] == ["      of which qwen3-4b, fp32 KV: 6.0 GB"]
    assert lines(140, is_encrypted=True)[1].endswith(" · encrypted")


def test_which_model_it_is_or_why_there_is_none():
    assert model_words(CacheReport.from_json(cache_state())) == "smollm2-135m · block 16 tok = 737 kB fp32"
    words = [model_words(CacheReport.from_json({"model_state": state})) for state in ("loading", "unloaded", "failed")]
    assert words == ["a model is being loaded", "unloaded, a message loads it", "no model is loaded"]


STATS = {"num_prompt_tokens": 3098, "num_cached_tokens": 2944, "ttft_s": 0.19, "tokens_per_s": 31.4, "prefill_s": 0.08}


def stats(debug=None, **fields) -> ReplyStats:
    found = ReplyStats.from_json(STATS | fields | {"chatkv": debug})
    assert found is not None
    return found


def test_the_proof_names_the_tiers_the_load_and_the_prefill():
    debug = {
        "cached_by_tier": {"disk": 1044, "device": 1900, "host": 0},
        "load": {"is_loaded": True, "load_s": 0.12, "compute_s": 1.0, "num_loaded_tokens": 1044},
    }
    assert proof_text(stats(debug)) == (
        "reused 2,944/3,098 tok (95%) device 1,900 disk 1,044 · loaded in ~0.12 s · prefill 154 in 0.08 s · "
        "TTFT 0.19 s · 31.4 tok/s"
    )
    debug["load"]["is_loaded"] = False
    assert "loaded" not in proof_text(stats(debug)), "it was cheaper to compute"
    assert "device" not in proof_text(stats({"cached_by_tier": {"device": 2944}}))


def test_the_reason_is_told_only_when_much_was_computed_though_something_else_was_kept():
    miss = {"position": 412, "text_before": "for two, budget", "text": " 700 €\n", "expected_text": " 600 €"}
    assert why_computed(stats({"miss": miss}, num_cached_tokens=412)) == (
        "differs from token 412 on after “…for two, budget”: “ 700 €\\n”, where “ 600 €” is kept"
    )
    assert why_computed(stats({"miss": miss})) == "", "154 of 3,098: a turn's own text"
    assert why_computed(stats({"miss": miss | {"expected_text": ""}}, num_cached_tokens=412)) == ""
    assert why_computed(stats({"miss": None}, num_cached_tokens=0)) == ""


def test_a_new_text_is_no_reason_and_a_lost_one_is():
    """Also as the database keeps it, without the other text."""
    miss = {"position": 412, "text": " 700 €", "is_other_kept": True}
    assert why_computed(stats({"miss": miss, "num_recomputed_tokens": 0}, num_cached_tokens=412)) == ""
    assert why_computed(stats({"miss": miss, "num_recomputed_tokens": 2500}, num_cached_tokens=412)) == (
        "differs from token 412 on: “ 700 €”, where other text is kept"
    )
    miss["is_other_kept"] = False
    assert why_computed(stats({"miss": miss, "num_recomputed_tokens": 2500}, num_cached_tokens=412)) == (
        "2,500 tokens of its earlier text were not kept, from token 412 on: “ 700 €”"
    )
    assert why_computed(stats({"miss": miss, "num_recomputed_tokens": 48})) == "", "too little to speak of"


def test_what_a_prompt_holds_cannot_reach_the_terminal_through_the_reason():
    miss = Miss.from_json({"position": 1, "text": "\x1b]52;c;x\x07\n", "expected_text": "\x9b31m\t"})
    assert miss is not None
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in miss.text + miss.expected_text)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"tiers": None, "chats": None, "shared": None},
        {"tiers": {"device": 5, "host": [], "disk": None}, "chats": [{}], "shared": [{}]},
        {"chats": [{"chat_id": 5, "runs": [["disk"], 3], "num_tokens": "x", "resume_s": "soon"}]},
        {"chats": [{"chat_id": "a", "runs": [["disk", -4], ["tape", 3]]}]},
    ],
)
def test_odd_reports_do_no_harm(data):
    found = CacheReport.from_json(data)
    for row in chain_rows(found, "last use", 1.0, Glyphs()):
        assert cell_len(drawn(row.runs(80, Palette()))) == 80
    tier_lines(found, "cpu", 80, Palette())
    kept_rows(found, "cpu", Palette())


def test_deleting_a_chat_says_what_became_of_its_cache():
    assert cached_gone({"cache": {"num_removed": 12, "num_shared": 3}}) == (
        "12 cached blocks are gone; 3 stay, since other chats begin with them."
    )
    assert cached_gone({"cache": {"num_removed": 0, "num_shared": 0}}) == cached_gone({}) == ""
    assert mapping({"cache": None}, "cache") == {}
