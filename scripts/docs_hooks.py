"""mkdocs hooks: adds linked files outside docs/ and unlisted pages to the site, and adapts links and tables."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {"index.md": "README.md"} | {f"{name}.md": f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")}
"""Page of the site -> file of the repository."""
WIDE = 12
"""Pages with tables of more columns have no table of contents."""
_LINK = r"\]\(((?!https?:|#|mailto:)[^)\s#]+)"


def on_config(config):
    """Add pages that are not in mkdocs.yml to the section "More"."""
    named = set(re.findall(r"[\w/.-]+\.md", str(config.nav)))
    more = next(section["More"] for section in config.nav if "More" in section)
    more += sorted(path.name for path in DOCS.glob("*.md") if path.name not in named)
    return config


def on_files(files, config):
    """Add README as the first page, and files outside docs/ that pages link to."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    linked = {
        (folder / link).resolve()
        for folder, pages in ((DOCS, DOCS.glob("*.md")), (ROOT, [ROOT / source for source in PAGES.values()]))
        for page in pages
        for link in re.findall(_LINK, page.read_text(encoding="utf-8"))
    }
    for path in sorted(linked):
        if path.is_file() and DOCS not in path.parents and path.suffix != ".md":
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def _bare_bars(markdown):
    """Unescape bars in code in tables: GitHub needs the backslash, mkdocs would show it."""
    row = re.compile(r"^\|.*$", re.MULTILINE)
    code = re.compile(r"`[^`]*`")
    return row.sub(lambda line: code.sub(lambda span: span[0].replace(r"\|", "|"), line[0]), markdown)


def on_page_markdown(markdown, page, config, files):
    """Adapt links between docs/ and other folders to the site, and make room for wide tables."""
    if max((row.count("|") for row in re.findall(r"^\|[-:|]+\|$", markdown, re.MULTILINE)), default=0) > WIDE:
        page.meta["hide"] = ["toc"]
    markdown = _bare_bars(markdown)
    if page.file.src_uri in PAGES:
        markdown = re.sub(r"(\]\(|src=\")docs/", r"\1", markdown)
        return markdown.replace("](CONTRIBUTING)", "](CONTRIBUTING.md)").replace("](README.md)", "](index.md)")
    return markdown.replace("](../", "](") if "/" not in page.file.src_uri else markdown
