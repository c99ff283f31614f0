"""`make test` begins with the files that take longest."""

from tests.conftest import ROOT, begin_with_longest
from tests.longest import longest, measured

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_files" time="3.5"/><testcase classname="tests.test_lease.Holder" time="9.6"/>
<testcase classname="" name="tests.data_prep.test_s3" time="9"/>
<testcase classname="tests.cli.test_help" time="4.9"/><testcase classname="tests.test_files" time="2.5"/>
</testsuite></testsuites>"""


def test_the_list_has_files_that_are_there_in_order():
    assert len(longest()) > 1
    assert [path for path in longest() if not (ROOT / path).is_file()] == []
    assert sorted(longest().values(), reverse=True) == list(longest().values())


def test_a_report_is_added_up_by_file(tmp_path):
    (tmp_path / "junit.xml").write_text(REPORT)
    assert measured(tmp_path / "junit.xml") == {"tests/test_lease.py": 10, "tests/test_files.py": 6}


def test_the_longest_files_come_first_and_the_others_as_they_were():
    class Item:
        def __init__(self, path):
            self.path = ROOT / path

    first, second, *_ = longest()
    items = [Item(path) for path in ("tests/b.py", second, "tests/a.py", first, second)]
    begin_with_longest(items)
    assert [str(item.path.relative_to(ROOT)) for item in items] == [first, second, second, "tests/b.py", "tests/a.py"]
