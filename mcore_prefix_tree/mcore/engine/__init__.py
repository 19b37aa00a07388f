"""Everything between samples and losses, for any loop: fold, schedule, account, evaluate, score, verify, compare."""
