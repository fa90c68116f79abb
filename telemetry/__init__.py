"""What every process logs and traces, so that gateway, engine and semantic cache do it alike.

Read logs.py for lines of logs, and tracing/ for spans. OpenTelemetry is imported only where traces are on.
"""
