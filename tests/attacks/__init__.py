"""Tests of the attacks. A package, so that file names may repeat in other folders."""
