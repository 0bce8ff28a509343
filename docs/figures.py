"""Makes the figures of the course (docs/course/figures/): runs what each shows, and writes it as SVG.

python docs/figures.py            # all
python docs/figures.py pool       # some

Nothing is measured here, and nothing depends on the processor: what is drawn are decisions of the engine, and times
that benchmarks/results/cpu-costs.json keeps. tests/test_course.py makes the figures again and compares them with the
files. docs/chat.svg is made by benchmarks/chat_session.py, and pictures of measurements by `bench.py --plot`.
"""

import json
import math
import sys
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent / "course" / "experiments"))

import batching
import drafts
import experts
import kept
import kernel
import masks
import overlap
import pictures
import pool
import prefixes
import routers
import torch
from dry import Scheduler, StaticScheduler

from benchmarks.costs import Costs
from nanopage.state import pages

DOCS = Path(__file__).parent
FIGURES = DOCS / "course" / "figures"
COLORS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#8a8a2f"]
INK, PALE, GRAY = "#24292f", "#e7eaee", "#8c959f"
CHAR = 0.6  # width of a character of the font, in font sizes


class Picture:
    """An SVG on a white ground, so that it can be read on a page of any color.

    Sizes are in pixels; x and y are those of the upper left corner of the picture, y downwards.
    """

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, text: str = "", edge: str = "none"
    ) -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}" stroke="{edge}"/>'
        )
        if text:
            ink = INK if fill in (PALE, "white") else "white"
            self.text(x + width / 2, y + height / 2 + 4, text, "middle", ink)

    def text(self, x: float, y: float, text: str, anchor: str = "start", ink: str = INK, size: int = 12) -> None:
        """The baseline of the text is at y."""
        more = f' font-size="{size}"' if size != 12 else ""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}"{more}>{escape(text)}</text>')

    def line(self, points: list[tuple[float, float]], color: str, width: float = 2, dash: str = "") -> None:
        at = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
        more = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="{width:g}"{more}/>')

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
                f'width="{self.width:g}" height="{self.height:g}" font-family="monospace" font-size="12" '
                'xml:space="preserve">',
                f"<title>{escape(self.title)}</title>",
                f'<rect width="{self.width:g}" height="{self.height:g}" rx="6" fill="white"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )


def costs() -> Costs:
    """What steps of the default model were measured to take on two cores."""
    results = json.loads((DOCS.parent / "benchmarks" / "results" / "cpu-costs.json").read_text())
    return Costs(results["costs"]["seconds"])


def step_time() -> Picture:
    """Chapter 1: a step with more sequences takes longer, but not in proportion."""
    sizes, context, steps = [1, 2, 4, 8, 16, 32, 64], 200, costs()
    picture = Picture(640, 330, "How long a decode step takes with 1 to 64 sequences")
    picture.text(20, 28, f"One decode step, with a context of {context} tokens for each sequence", size=14)
    times = []
    for size in sizes:
        fixed, each = steps.decodes(size)
        times.append(1000 * (fixed + each * context * size))
    bottom, most = 262.0, max(times)
    for index, (size, ms) in enumerate(zip(sizes, times, strict=True)):
        x, height = 40 + 84 * index, 180 * ms / most
        alone = 180 * times[0] / most
        picture.box(x, bottom - height, 52, height, COLORS[1])
        picture.box(x, bottom - alone, 52, alone, COLORS[0])
        picture.text(x + 26, bottom - height - 8, f"{ms:.1f} ms", "middle")
        picture.text(x + 26, bottom + 18, str(size), "middle")
        picture.text(x + 26, bottom + 36, f"{1000 * size / ms:.0f} tok/s", "middle", COLORS[2])
    picture.text(
        20, 318, "below: sequences in the step, output tokens per second; blue: what one alone takes", ink=GRAY
    )
    return picture


def block_pool() -> Picture:
    """Chapter 2: who has which block in each step."""
    steps = pool.run()
    num_blocks = len(steps[0][0])
    picture = Picture(80 + 22 * len(steps) + 20, 60 + 22 * num_blocks + 64, "Blocks of three requests over time")
    picture.text(20, 28, "Who has which block, step by step", size=14)
    for block in range(num_blocks):
        picture.text(62, 60 + 22 * block + 15, f"{'block ' if block == 0 else ''}{block}", "end")
    for number, (owners, waiting) in enumerate(steps):
        x = 72 + 22 * number
        for block, owner in enumerate(owners):
            fill = PALE if owner == "." else COLORS["ABC".index(owner)]
            picture.box(x, 60 + 22 * block, 20, 20, fill, "" if owner == "." else owner)
        y = 60 + 22 * num_blocks
        picture.text(x + 10, y + 16, str(number + 1), "middle", size=10)
        for name in waiting:
            picture.box(x, y + 26, 20, 20, "white", name, edge=COLORS["ABC".index(name)])
    y = 60 + 22 * num_blocks
    picture.text(62, y + 16, "step", "end")
    picture.text(62, y + 40, "waits", "end")
    return picture


def batches() -> Picture:
    """Chapter 3: static and continuous batching."""
    runs = {"static": batching.run(StaticScheduler), "continuous": batching.run(Scheduler)}
    longest = max(result.num_steps for result in runs.values())
    picture = Picture(40 + 16 * longest, 320, "Eight requests in four places, batched statically and continuously")
    y = 28.0
    for title, result in runs.items():
        picture.text(20, y, f"{title} batching: {result.num_steps} steps", size=14)
        for place in result.places:
            y += 24
            for step, name in enumerate(place):
                x, color = 20 + 16 * step, PALE if name == "." else COLORS["ABCDEFGH".index(name.upper())]
                picture.box(x, y - 12, 15, 20, color, "" if name == "." else name)
        y += 42
    picture.text(20, y - 4, "a lower-case letter: a step of its prompt; gray: the place is empty", ink=GRAY)
    return picture


def prefix_sharing() -> Picture:
    """Chapter 4: block tables that share blocks, and the state of each block."""
    states = prefixes.run()
    picture = Picture(680, 84 + 66 * len(states), "Requests that share the blocks of their beginning")
    picture.text(20, 28, "Block tables, and the blocks behind them", size=14)
    picture.text(270, 56, "block tables", ink=GRAY)
    picture.text(470, 56, f"blocks 0 to {len(states[0].blocks) - 1}", ink=GRAY)
    for number, state in enumerate(states):
        y = 66 + 66 * number
        picture.line([(20, y), (660, y)], PALE, 1)
        first, _, rest = state.what.partition(": ")
        picture.text(20, y + 24, first)
        picture.text(20, y + 42, rest, ink=GRAY, size=11)
        for row, (name, table) in enumerate(state.tables.items()):
            picture.text(262, y + 22 + 24 * row, name, "end")
            for index, block in enumerate(table):
                picture.box(270 + 30 * index, y + 7 + 24 * row, 28, 20, COLORS[block], str(block))
        for block, what in enumerate(state.blocks):
            fill = {"free": PALE, "cached": "white"}.get(what, COLORS[block])
            words = {"free": "", "cached": "kept"}.get(what, f"x{what}")
            picture.box(
                470 + 32 * block, y + 7, 30, 20, fill, words, edge=COLORS[block] if what == "cached" else "none"
            )
    picture.text(20, picture.height - 8, "x2: in two tables; kept: in none, but in the prefix cache", ink=GRAY)
    return picture


def triton_pages() -> Picture:
    """Chapter 5: where the tokens of two sequences are in the pages, as nanopage's Triton kernel has written them."""
    lengths = kernel.LENGTHS.values()
    numbers = [100 * index + position for index, length in enumerate(lengths) for position in range(length)]
    codes = torch.tensor([[10.0 * number + dim for dim in range(kernel.HEAD_DIM)] for number in numbers])
    cache = kernel.write(codes, codes)
    k_pages, v_pages = pages.views(cache, kernel.HEAD_DIM)
    picture = Picture(640, 606, "K and V of two sequences in pages, and attention over them")
    picture.text(20, 28, "After write_kernel: token and dimension in each place of the cache", size=14)
    colors = {(0, position): COLORS[0] for position in range(4)} | {(0, 4): COLORS[5], (0, 5): COLORS[5]}

    def page(x: float, y: float, rows: list[list[float]]) -> None:
        for i, row in enumerate(rows):
            for j, code in enumerate(row):
                fill, text = PALE, ""
                if code == code:  # not NaN
                    sequence, rest = divmod(int(code), 1000)
                    token, dim = divmod(rest, 10)
                    fill, text = colors.get((sequence, token), COLORS[1]), f"{'AB'[sequence]}{token}.{dim}"
                picture.box(x + 46 * j, y + 24 * i, 44, 22, fill, text)

    for block in range(kernel.NUM_BLOCKS):
        y = 68.0 + 118 * block
        picture.text(20, y + 15, f"block {block}")
        if block == 0:
            picture.text(110, y - 12, "K: a column for each token", ink=GRAY)
            picture.text(330, y - 12, "V: a row for each token", ink=GRAY)
        page(110, y, k_pages[block, 0].tolist())
        page(330, y, v_pages[block, 0].tolist())
    tables = ", ".join(f"{name} {table}" for name, table in kernel.TABLES.items())
    picture.text(20, 432, f"block tables: {tables}", ink=GRAY)
    q, k, v = kernel.inputs()
    _, seen = kernel.attend(q, kernel.write(k, v))
    picture.text(20, 468, "attend_kernel: what each program holds after each block", size=14)
    y = 474.0
    for program, (name, trace) in enumerate(seen.items()):
        for block, highest, total, scores in zip(trace.blocks, trace.highest, trace.total, trace.scores, strict=True):
            y += 24
            picture.text(20, y + 15, f"program {program} ({name}), block {block}")
            for index, value in enumerate(scores):
                hidden = value == float("-inf")
                picture.box(
                    210 + 52 * index, y, 50, 22, PALE if hidden else COLORS[3], "" if hidden else f"{value:.2f}"
                )
            picture.text(430, y + 15, f"highest {highest:.2f}")
            picture.text(550, y + 15, f"total {total:.2f}")
    picture.text(20, 594, "violet: scores", ink=GRAY)
    return picture


def overlapping() -> Picture:
    """Chapter 6: when the host and the device work, without and with async scheduling."""
    runs = {"one step after the other": overlap.run(False), "async scheduling": overlap.run(True)}
    scale = 7.2
    picture = Picture(660, 250, "Host and device, without and with async scheduling")
    colors = {"schedule": COLORS[0], "submit": COLORS[1], "update": COLORS[2], "wait": PALE}
    y = 28.0
    for title, device in runs.items():
        picture.text(20, y, f"{title}: {len(device.device)} steps in {device.clock / 2:g} ms", size=14)
        for name, works in {"host": device.host, "device": device.device}.items():
            picture.text(20, y + 29, name)
            for work in works:
                fill = colors.get(work.kind, COLORS[3])
                text = str(work.step) if work.kind == "step" else ""
                width = scale * (work.end - work.start) - 1
                picture.box(76 + scale * work.start, y + 14, width, 22, fill, text)
            y += 28
        y += 40
    x = 20.0
    for name, color in (colors | {"step": COLORS[3]}).items():
        picture.box(x, 222, 14, 14, color)
        picture.text(x + 20, 234, name)
        x += 34 + 12 * CHAR * (len(name) + 2)
    return picture


def accepted_drafts() -> Picture:
    """Chapter 7: which tokens of an answer were guessed."""
    tokenizer, prompt, answer = drafts.tokens()
    taken = drafts.steps(prompt, answer, drafts.lookup(4))
    guessed: list[bool] = []
    for _, accepted in taken:
        guessed += [True] * accepted + [False]
    picture = Picture(640, 270, "Which tokens of an answer came from drafts")
    picture.text(20, 28, f"{len(answer)} tokens in {len(taken)} steps, with drafts of up to 4 tokens", size=14)
    x, y = 20.0, 48.0
    for number, was_guessed in enumerate(guessed):
        text = tokenizer.decode(answer[: number + 1])[len(tokenizer.decode(answer[:number])) :]
        shown = drafts.visible(text)
        width = 12 * CHAR * len(shown) + 12
        picture.box(x, y, width, 24, COLORS[2] if was_guessed else COLORS[0], shown)
        x += width + 3
        if text.startswith("\n") or text.endswith("\n"):
            x, y = 20.0, y + 34
    picture.text(20, 258, "blue: sampled by its step; green: guessed before, and accepted in the same step", ink=GRAY)
    return picture


def routing() -> Picture:
    """Chapter 8: the time to the first token behind each router."""
    picture = Picture(640, 330, "Mean time to the first token with 1 to 8 replicas, behind three routers")
    picture.text(20, 28, "Mean time to the first token, and tokens of prompts that were cached", size=14)
    policies = list(routers.POLICIES)
    for index, policy in enumerate(policies):
        picture.box(20 + 150 * index, 44, 14, 14, COLORS[index])
        picture.text(40 + 150 * index, 56, policy)
    bottom = 270.0
    for column, count in enumerate(routers.REPLICAS):
        cells = [routers.run(policy, count) for policy in policies]
        most = max(each.ttft for each in cells)
        for index, each in enumerate(cells):
            x, height = 24 + 154 * column + 46 * index, 130 * each.ttft / most
            picture.box(x, bottom - height, 42, height, COLORS[index])
            picture.text(x + 21, bottom - height - 20, f"{each.ttft:.2f}s", "middle", size=10)
            picture.text(x + 21, bottom - height - 7, f"{100 * each.hits:.0f}%", "middle", GRAY, size=10)
        picture.text(24 + 154 * column + 69, bottom + 20, f"{count} replica{'s' * (count > 1)}", "middle")
    picture.text(20, 318, "each number of replicas has a scale of its own", ink=GRAY)
    return picture


def bars(picture: Picture, x: float, y: float, rows: dict[str, tuple[float, str]], color: str) -> None:
    """A horizontal bar of 20 pixels for each row, from x on: name -> (width, words behind it). Names end before x."""
    for index, (name, (width, words)) in enumerate(rows.items()):
        picture.text(x - 8, y + 24 * index + 14, name, "end")
        picture.box(x, y + 24 * index, width, 20, color)
        picture.text(x + width + 6, y + 24 * index + 14, words, ink=GRAY)


def expert_loads() -> Picture:
    """Chapter 9: how many experts a step reads, and how many tokens each of them gets."""
    picture = Picture(680, 268, "Experts that a step reads, and tokens of each expert")
    picture.text(20, 28, "Experts read by a step with 1 to 64 tokens", size=14)
    read = {str(size): experts.experts_read(size) for size in experts.SIZES}
    bars(picture, 100, 44, {name: (24 * count, f"{count:.1f} of 8") for name, count in read.items()}, COLORS[0])
    picture.text(390, 28, f"Tokens of each expert, of {experts.TOKENS}", size=14)
    counts = {f"{number}": count for number, count in enumerate(experts.loads(0.5))}
    bars(picture, 410, 44, {name: (0.8 * count, str(count)) for name, count in counts.items()}, COLORS[1])
    mean = 410 + 0.8 * sum(counts.values()) / len(counts)
    picture.line([(mean, 40), (mean, 238)], INK, 1, "4 3")
    picture.text(20, 256, "dashed: the mean; with a device for each expert, the longest bar is the time", ink=GRAY)
    return picture


def kept_bytes() -> Picture:
    """Chapter 10: what layers keep of a long sequence."""
    rows = {name: row[-1] / 2**20 for name, row in kept.sizes().items()}
    picture = Picture(680, 84 + 24 * len(rows), "What layers keep of a long sequence")
    picture.text(20, 28, f"MiB for a sequence of {kept.CONTEXTS[-1]:,} tokens", size=14)
    lengths = {name: (60 * math.log10(size) - 60, f"{size:,.0f}") for name, size in rows.items()}
    bars(picture, 270, 44, lengths, COLORS[0])
    picture.text(20, picture.height - 12, "logarithmic: 60 pixels stand for a factor of ten", ink=GRAY)
    return picture


def pictures_in_steps() -> Picture:
    """Chapter 11: which tokens of prompts with pictures each step computes."""
    picture = Picture(680, 48 + 72 * len(pictures.CASES), "Prompts with pictures, and the steps that compute them")
    picture.text(20, 28, f"Steps of at most {pictures.BUDGET} tokens; red and blue: tokens of pictures", size=14)
    for row, (parts, whole) in enumerate(pictures.CASES):
        y = 48.0 + 72 * row
        picture.text(20, y + 12, "not cut" if whole else "", ink=GRAY)
        token_ids, items = pictures.read(parts, whole)
        fills = [PALE] * len(token_ids)
        for item, color in zip(items, (COLORS[4], COLORS[0]), strict=True):
            fills[item.position : item.position + item.length] = [color] * item.length
        for index, fill in enumerate(fills):
            picture.box(92 + 9 * index, y, 8, 16, fill)
        for number, step in enumerate(pictures.serve(pictures.make_scheduler(), 0, parts, whole)[1], 1):
            picture.line([(92 + 9 * step.start, y + 24), (90 + 9 * step.end, y + 24)], INK)
            begins = "".join(f", encodes {each}" for each in step.pictures)
            picture.text(92 + 9 * step.start, y + 40, f"step {number}{begins}", size=11)
    return picture


def allowed_tokens() -> Picture:
    """Chapter 12: how many tokens a grammar allows at each token of a text."""
    choices = masks.run(masks.make_vocabulary())
    picture = Picture(640, 88 + 24 * len(choices), "How many tokens may come next")
    picture.text(20, 28, f"Tokens that may come next, in {masks.TEXT}", size=14)
    rows = {f"{i}: {each.token}": each.allowed for i, each in enumerate(choices, 1)}
    lengths = {name: (8 + 80 * math.log10(len(allowed)), f"{len(allowed):,}") for name, allowed in rows.items()}
    bars(picture, 150, 44, lengths, COLORS[2])
    picture.text(
        20, picture.height - 12, "left: the token that came. Logarithmic: a factor of ten is 80 pixels", ink=GRAY
    )
    return picture


ALL = {
    "step-time": step_time,
    "pool": block_pool,
    "batching": batches,
    "prefixes": prefix_sharing,
    "pages": triton_pages,
    "overlap": overlapping,
    "drafts": accepted_drafts,
    "routers": routing,
    "experts": expert_loads,
    "kept": kept_bytes,
    "pictures": pictures_in_steps,
    "masks": allowed_tokens,
}


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in ALL]:
        sys.exit(f"no figure {unknown[0]}; there are {', '.join(ALL)}")
    FIGURES.mkdir(exist_ok=True)
    for name in names or ALL:
        (FIGURES / f"{name}.svg").write_text(ALL[name]().svg())


if __name__ == "__main__":
    main(sys.argv[1:])
