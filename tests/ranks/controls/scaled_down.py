"""Elastic training on one or two nodes: half a minute after a node has left, the other goes on by itself until it is done.

Each attempt trains for 25 s. torchrun restarts the ranks that stay, since their gloo connections broke.
"""

import os

from control import begin, finish, train, truth


def main() -> None:
    begin(timeout_s=60)
    truth(f"world of {os.environ['WORLD_SIZE']}")
    train(250)
    finish()


main()
