"""A docstring can be read alone: its first line says what the thing is or does, not what the line above left open."""

import ast

from test_rooms import MODULES, nodes

LEANING = ("As", "How", "Likewise", "Of", "That", "Those", "What", "Where", "Which", "Who", "Why")
"""First words of a sentence that leans on another one, or is half of one."""


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    leaning = []
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                words = (ast.get_docstring(node) or "A").split()
                if words[0].strip(",.:;") in LEANING:
                    leaning.append(f"{module}.{getattr(node, 'name', '')}: {' '.join(words[:8])}")
    assert not leaning, "\n".join(leaning)
