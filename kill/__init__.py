"""Runs that are killed and resumed: nothing may be lost, differ or stay behind."""
