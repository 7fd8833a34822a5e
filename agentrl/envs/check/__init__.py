"""Is this world worth training on? A check that authors call in their tests.

    from agentrl.envs.check import check_env

    def test_the_environment_passes_its_check():
        report = check_env(Capitals)
        assert report.ok, report

Every probe plays through `agentrl.play`. An error means that training on this world would learn the wrong
behaviour, or stop; a warning is for the author to judge; figures are only reported.
"""

from agentrl.envs.check.report import CheckReport, Finding, Severity
from agentrl.envs.check.run import check_env, check_env_async

__all__ = ["CheckReport", "Finding", "Severity", "check_env", "check_env_async"]
