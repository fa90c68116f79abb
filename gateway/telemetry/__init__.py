"""What the gateway tells its operators of requests: a line of the log, a trace, sums, an audit of what operators did.

Read record.py first: what is known of a request, filled in along its way. request_log.py makes a line, metrics and the
end of a trace of it; tracing.py names what is in a trace; statistics.py has sums over minutes and hours, and
recent_requests.py the last requests; audit.py is for actions of operators. Uses settings, the package cache and the
package telemetry.
"""
