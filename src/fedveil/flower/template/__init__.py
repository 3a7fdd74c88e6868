"""The files of an app that `fedveil flower new` writes. They are text here: NAME and the like are filled in."""
