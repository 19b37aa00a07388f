"""Parts of ``scripts/gpu_check``: tests and benchmarks of a machine with a GPU, within a time limit, into one file.

The parent process (:mod:`gpu_check_parts.check`) imports only Python's standard library, so that no missing package
and no crash can stop it. Every part runs in a child process (:mod:`gpu_check_parts.child`) that sends one line per
started measurement and one line per measured row.
"""
