"""`make test` begins with the files that take longest."""

from tests.clone import ROOT
from tests.longest import longest, measured

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_files" time="3.5"/><testcase classname="tests.test_lease.Holder" time="9.6"/>
<testcase classname="" name="tests.data_prep.test_stores" time="9"/>
<testcase classname="tests.cli.test_help" time="4.9"/><testcase classname="tests.test_files" time="2.5"/>
</testsuite></testsuites>"""


def test_the_list_has_files_that_are_there_longest_first():
    seconds = longest()
    assert [path for path in seconds if not (ROOT / path).is_file()] == []
    assert [*seconds.values()] == sorted(seconds.values(), reverse=True)


def test_a_report_is_added_up_by_file(tmp_path):
    (tmp_path / "junit.xml").write_text(REPORT)
    assert measured(tmp_path / "junit.xml") == {"tests/test_lease.py": 10, "tests/test_files.py": 6}
