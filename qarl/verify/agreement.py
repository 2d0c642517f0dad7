"""The assertion for tests."""

from qarl.verify.findings import DisagreementError, Report


def assert_agreement(report: Report, complete: bool = False) -> None:
    """Raise `DisagreementError`, an `AssertionError`, if a comparison found a fault.

    Args:
        report: Return value of `qarl.verify.weights` or `qarl.verify.logprobs`.
        complete: Raise also if something was not compared.
    """
    if report.faults or (complete and report.unchecked):
        raise DisagreementError("\n".join(["", *report.lines(100)]))
