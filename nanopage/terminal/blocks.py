"""The live view in a terminal: queues, requests, blocks and sentences of a Picture, drawn with rich.

A block is shown as the number of its request, `×2` if several sequences share it, `▒` if only the prefix cache has it,
and `·` if it is free. So it can be read without colour, too.
"""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nanopage.view.picture import Picture, Request

COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")
BARS = "▁▂▃▄▅▆▇█"
CACHED, FREE = "▒", "·"
MAX_SENTENCES = 8
WIDE = 3  # columns of a block that is shown with its request's number


def draw(picture: Picture, width: int, height: int, tokens_per_second: float | None = None) -> RenderableType:
    """The whole picture, in `height` lines of `width` columns as far as possible. Totals are left out before the first
    step."""
    key = picture.key
    owners = picture.owners()
    waiting, running, swapped = picture.queues
    free = key["num_blocks"] - len(owners) - len(picture.cached)
    steps = picture.last["step"]
    facts = [f"step {steps}"] if steps else []
    if tokens_per_second is not None:
        facts.append(f"{tokens_per_second:.0f} tok/s")
    facts += [f"{len(running)} running", f"{len(waiting)} waiting", f"{len(swapped)} swapped"]
    hits = picture.hit_tokens / max(1, picture.prompt_tokens)
    facts += [f"{picture.preempted} preempted", f"{hits:.0%} prefix hits"] if steps else []
    if picture.encoder:
        facts.append("{2} items looked up, {3} in the encoder cache".format(*picture.encoder))
    sentences = [text for _, _, text in picture.last["why"]][-MAX_SENTENCES:]
    while (num_lines := sum(-(-(len(text) + 2) // width) + 1 for text in sentences)) > height // 2:
        sentences.pop(0)
    shown = [*running, *swapped, *waiting]
    num_rows = max(1, min(len(shown), (height - num_lines - 6) // 2))
    map_height = max(1, height - num_lines - num_rows - 6 - bool(picture.host))
    note = f"{key['num_blocks']} blocks of {key['block_size']} tokens: "
    note += f"{len(owners)} used, {len(picture.cached)} cached, {free} free"
    parts: list[RenderableType] = [
        Text("  ".join(facts), style="bold", no_wrap=True, overflow="ellipsis"),
        _requests(picture, shown[:num_rows]) if shown else Text("no request", style="dim"),
    ]
    if len(shown) > num_rows:
        parts.append(Text(f"and {len(shown) - num_rows} more", style="dim"))
    parts += [
        Text(note, style="dim", no_wrap=True, overflow="ellipsis"),
        _blocks(key["num_blocks"], owners, picture.cached, width, map_height),
    ]
    if picture.host:
        used = sum(len(set(blocks)) for _, blocks in picture.host.values())
        whose = ", ".join(f"request {owner}" for owner in sorted({owner for owner, _ in picture.host.values()}))
        text = f"host memory: {used} of {key['num_host_blocks']} blocks, of {whose}"
        parts.append(Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
    parts += [Text(f"- {text}") for text in sentences]
    return Group(*parts)


def _requests(picture: Picture, numbers: list[int]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), expand=False)
    running, swapped = set(picture.queues[1]), set(picture.queues[2])
    blocks: dict[int, set[int]] = {}
    for owner, mine in picture.tables.values():
        blocks.setdefault(owner, set()).update(mine)
    longest = max((picture.requests[number].tokens for number in numbers), default=1)
    for number in numbers:
        request = picture.requests[number]
        phase = "waiting"
        if number in running:
            phase = "prefill" if request.computed < request.prompt else "decode"
        elif number in swapped:
            phase = "swapped"
        notes = []
        if request.preemptions:
            notes.append(f"preempted {request.preemptions}×")
        if request.completions > 1:
            notes.append(f"{request.completions} {'beams' if request.beams else 'completions'}")
        if request.items:
            notes.append(f"{len(request.items)} item{'s' * (len(request.items) > 1)}")
        table.add_row(
            Text(f"{number:>3}", style=_color(number)),
            phase,
            _bar(request, longest),
            f"{request.prompt} + {request.tokens - request.prompt}",
            f"{len(blocks.get(number, ()))} blocks",
            ", ".join(notes),
        )
    return table


def _bar(request: Request, longest: int, width: int = 24) -> Text:
    """A bar of the prompt's computed part, the rest of the prompt, and the output."""
    scale = width / max(1, longest)
    done = round(min(request.computed, request.prompt) * scale)
    prompt, whole = round(request.prompt * scale), round(request.tokens * scale)
    return Text("█" * done + "░" * (prompt - done) + "=" * (whole - prompt), style=_color(request.number))


def _blocks(count: int, owners: dict[int, list[int]], cached: set[int], width: int, height: int) -> Text:
    """The block map. A block is three columns wide if there is room, else one column, or a column stands for several
    blocks. If there is no room for all, free blocks at the end are left out."""
    text, num_all = Text(), count
    if -(-count // max(1, width // WIDE)) > height:
        count = min(count, max([*owners, *cached, width]) + 1)
    wide = WIDE if -(-count // max(1, width // WIDE)) <= height else 1
    columns = max(1, width // wide)
    each = max(1, -(-count // (columns * height)))
    for cell in range(-(-count // each)):
        if cell and cell % columns == 0:
            text.append("\n")
        if each == 1:
            text.append_text(_block(owners.get(cell), cell in cached, wide))
        else:
            blocks = range(cell * each, min(count, (cell + 1) * each))
            used = sum(block in owners for block in blocks)
            kept = any(block in cached for block in blocks)
            text.append(BARS[(used * len(BARS) - 1) // len(blocks)] if used else CACHED if kept else FREE)
    notes = [f"a column is {each} blocks"] if each > 1 else []
    if count < num_all:
        notes.append(f"{num_all - count} more are free")
    if notes:
        text.append(f"\n({'; '.join(notes)})", style="dim")
    return text


def _block(owners: list[int] | None, is_cached: bool, wide: int) -> Text:
    if owners is None:
        return Text((CACHED if is_cached else FREE).rjust(wide - 1 or 1).ljust(wide), style="dim")
    label = f"×{len(owners)}" if len(set(owners)) > 1 else str(owners[0])
    return Text(label[-(wide - 1 or 1) :].rjust(wide - 1 or 1).ljust(wide), style=_color(owners[0]))


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
