"""The matrix of test rows, its renderers and the local runner. ``ci/policy.md`` says what skips and what fails."""
