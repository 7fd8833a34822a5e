"""Is this world worth training on? A check that authors call in their tests.

    from agentrl.envs.check import check_env

    def test_the_environment_passes_its_check():
        report = check_env(Capitals)
        assert report.ok, report

Every probe plays through `agentrl.play`. An error means that training on this world would learn the wrong
behaviour, or stop; a warning is for the author to judge; figures are only reported.
"""

from agentrl.envs.check.attack import AttackReport, TriedStrategy, attack_env
from agentrl.envs.check.findings import Finding, Severity
from agentrl.envs.check.outcomes import CheckOutcome, Status
from agentrl.envs.check.report import CheckReport
from agentrl.envs.check.rfc008 import Check
from agentrl.envs.check.run import check_env, check_env_async, check_package

__all__ = [
    "AttackReport",
    "Check",
    "CheckOutcome",
    "CheckReport",
    "Finding",
    "Severity",
    "Status",
    "TriedStrategy",
    "attack_env",
    "check_env",
    "check_env_async",
    "check_package",
]
