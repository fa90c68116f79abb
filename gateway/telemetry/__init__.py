"""What the gateway tells its operators of requests: a line of the log, a trace, an audit of what operators did.

Read record.py first: what is known of a request, filled in along its way. request_log.py makes a line, metrics and the
end of a trace of it; tracing.py names what is in a trace; audit.py is for actions of operators. Uses settings and the
package telemetry.
"""
