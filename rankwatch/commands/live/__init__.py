"""What `top`, `status`, `stacks`, `open` and `ls` share: running launchers of this machine, a source of pictures, and how a picture is drawn."""
