"""All metadata is in pyproject.toml; this file is here for tools that look for one."""

from setuptools import setup

setup()
