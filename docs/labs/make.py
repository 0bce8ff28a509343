"""Makes the pages of the labs: each is a recording of the live view, with the questions of README.md.

python docs/labs/make.py            # writes docs/labs/1.html to 5.html
python docs/labs/make.py FOLDER     # or elsewhere
"""

import re
import sys
from pathlib import Path

from nanopage.view.export import find_recording, make_page

LABS = Path(__file__).parent
LAB = re.compile(r"^## (\d\. .*)\n\nRecording: `([\w-]+)`", re.MULTILINE)
QUESTION = re.compile(
    r"^\*\*Question\.\*\* (.*?)\n\n<details><summary>Answer</summary>\n\n(.*?)\n\n</details>", re.MULTILINE | re.DOTALL
)


def read_labs() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(title, name of the recording, [(question, answer)]) of each lab in README.md."""
    labs = []
    for part in re.split(r"^(?=## \d)", (LABS / "README.md").read_text(), flags=re.MULTILINE)[1:]:
        found = LAB.match(part)
        if found is None:
            raise ValueError(f"README.md: a lab without the line of its recording: {part.splitlines()[0]}")
        questions = [(_line(question), _line(answer)) for question, answer in QUESTION.findall(part)]
        labs.append((found[1], found[2], questions))
    return labs


def _line(text: str) -> str:
    return " ".join(text.split())


def main(folder: Path) -> None:
    for number, (title, recording, questions) in enumerate(read_labs(), 1):
        file = folder / f"{number}.html"
        file.write_bytes(make_page(find_recording(recording), title, questions))
        print(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LABS)
