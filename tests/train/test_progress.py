"""Progress: items pass through, lines off a terminal, bars on one, nothing on other ranks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import collie_train.progress as module
from collie_train.progress import progress


@pytest.fixture
def screen(monkeypatch):
    def make(terminal):
        fresh = module._Screen()
        fresh.console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        monkeypatch.setattr(module, "_screen", fresh)
        return fresh.console.file

    return make


def test_lines_where_there_is_no_terminal(screen, monkeypatch):
    output = screen(terminal=False)
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)
    bar = progress([10, 20], desc="[Training]")
    seen = []
    for item in bar:
        seen.append(item)
        bar.set_postfix(loss=item / 30, note="a")
    assert seen == [10, 20] and len(bar) == 2
    assert output.getvalue().splitlines()[:2] == [
        "[Training] 1/2 loss=0.3333, note=a",
        "[Training] 2/2 loss=0.6667, note=a",
    ]
    assert "\x1b" not in output.getvalue()


def test_few_lines_by_default(screen):
    output = screen(terminal=False)
    for _ in progress(range(1000), desc="x"):
        pass
    assert output.getvalue() == "x 1000/1000\n"


def test_no_line_comes_twice_in_a_row(screen, monkeypatch):
    output = screen(terminal=False)
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)
    bar = progress(range(2), desc="x")
    for _ in bar:
        bar.update(advance=0)
        bar.update(advance=0)
    assert output.getvalue().splitlines() == ["x 0/2", "x 1/2", "x 2/2"]


def test_nested_bars_on_a_terminal(screen):
    output = screen(terminal=True)
    for _ in progress(range(2), "Outer"):
        for _ in progress(iter([1]), "Inner", total=1):
            pass
    assert "Outer" in output.getvalue() and "Inner" in output.getvalue()
    assert module._screen._users == 0


def test_the_screen_is_given_back_when_a_loop_is_left(screen):
    screen(terminal=True)
    bar = iter(progress(range(3)))
    next(bar)
    bar.close()
    assert module._screen._users == 0


@pytest.mark.parametrize("disable", [True, False])
def test_silent_when_disabled_or_not_on_rank_0(screen, monkeypatch, disable):
    class Rank1:
        rank = 1

    if not disable:
        monkeypatch.setattr(module, "env", Rank1())
    output = screen(terminal=False)
    assert list(progress([1, 2], disable=disable)) == [1, 2]
    assert output.getvalue() == ""


def test_update_and_reset(screen):
    screen(terminal=False)
    bar = progress([], total=10, completed=3)
    bar.update(advance=2, desc="more", post_desc="p")
    assert (bar.completed, bar.desc, bar.post_desc) == (5, "more", "p")
    bar.reset(total=4)
    assert (bar.completed, bar.total, bar.desc) == (0, 4, "more")
    bar.set_description("d")
    bar.set_post_desc("q")
    assert (bar.desc, bar.post_desc) == ("d", "q")
    with pytest.raises(TypeError, match="no length"):
        len(progress(iter([])))
