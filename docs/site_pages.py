"""Hook of mkdocs: files outside `docs/` as pages of the site, so that no text is kept twice.

Links are written as they work in the repository, and are turned into the site's here. One to a file that
is no page, such as a folder of results, becomes its path in the text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "kernels/README.md": "how_kernels_work.md",
}
PICTURES = "benchmarks/results"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files, config):
    """Add the pages and pictures that lie outside `docs/`."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown, page, files, **_):
    """The page with the site's links."""
    here = next(
        (src for src, name in PAGES.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}"
    )

    def rewrite(match):
        picture, text, link = match.groups()
        path, _, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        if target in PAGES:
            name = PAGES[target]
        elif target.startswith("docs/"):
            name = target.removeprefix("docs/")
        elif target.startswith(f"{PICTURES}/") and target.endswith(".png"):
            name = target.replace(PICTURES, "results", 1)
        else:
            return f"`{target}`" if text == target else f"{text} (`{target}`)"
        if text == link and not picture:  # a path means nothing to who reads the site
            text = re.search(r"^# (.*)", (ROOT / target).read_text(), re.M)[1]
        return f"{picture}[{text}]({name}{'#' + anchor if anchor else ''})"

    return LINK.sub(rewrite, markdown)
