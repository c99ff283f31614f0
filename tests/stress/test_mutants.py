"""The mutations of `make mutants` are of code that is there, and name tests that exist."""

import shlex

import pytest

from tests.conftest import ROOT
from tests.stress.mutants.mutations import mutated, read_mutations


def test_nearly_all_mutations_change_their_file_and_all_name_tests():
    """A few may wait for the next `make mutants`, which refuses them, since their line has changed."""
    mutations, refused = read_mutations(), []
    assert len(mutations) > 100
    assert len({(mutation.file, mutation.title) for mutation in mutations}) == len(mutations)
    for mutation in mutations:
        text = (ROOT / mutation.file).read_text()
        try:
            assert mutated(text, mutation) != text
        except ValueError as error:
            refused.append(str(error))
        files = [word for word in shlex.split(mutation.tests) if word.startswith("tests/")]
        assert files
        assert all((ROOT / name).is_file() for name in files)
    assert len(refused) < 10, "\n".join(refused)


def test_a_mutation_of_code_that_has_changed_is_refused():
    mutation = read_mutations()[0]
    for text in ("", 2 * mutation.old):
        with pytest.raises(ValueError, match="times, not once"):
            mutated(text, mutation)
