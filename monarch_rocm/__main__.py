"""`python -m monarch_rocm`."""

from monarch_rocm.cli import main

raise SystemExit(main())
