from radq.cli import main

raise SystemExit(main())
