"""The programs inside the sandbox: they use the standard library only, and are started as subprocesses.

    enter.py        creates the namespaces and the file system; then becomes the warm parent
    zygote.py       the warm parent: forks one supervisor for every session
    supervisor.py   pid 1 of a session: enforces limits, reads output, ends all processes
    runner.py       the interpreter that runs a model's code, without any privilege
    one_process.py  supervisor and runner without a warm parent: in bubblewrap, or unprotected

They import each other relatively: outside the package is `agentrl.tools.python.inside`, inside the sandbox
it is `inside`, and no other module of agentrl is mounted.
"""
