"""Trains for 25 s. The runner stops launcher and ranks together for 20 s and lets them go on, as `scontrol suspend` or a closed lid does."""

from control import begin, finish, train


def main() -> None:
    begin(timeout_s=60)
    train(125, step_s=0.2)
    finish()


main()
