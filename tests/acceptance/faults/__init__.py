"""Does a real cluster under load keep the promises of docs/faults.md?"""
