"""What runs inside the sandbox: the standard library alone, started as a program of its own.

    enter.py        namespaces, the file system it will see; then becomes the warm parent
    zygote.py       the warm parent: forks one supervisor for every session
    supervisor.py   pid 1 of a session: limits, output, the end of everything in it
    runner.py       the interpreter that runs a model's code, with every privilege gone
    one_process.py  supervisor and runner without a warm parent: in bubblewrap, or unprotected

They import each other relatively: from outside this is `agentrl.tools.python.inside`, from inside it is
`inside`, and nothing else of ours is there.
"""
