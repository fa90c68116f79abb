"""What the application carries for its handlers, by type."""

from aiohttp import web

from cache.exact import ExactCache
from gateway.api.stats import GaugeUpdater
from gateway.pipeline import Pipeline
from gateway.proxy.conversations import ConversationKeeper
from gateway.proxy.embeddings import Embeddings
from gateway.proxy.lookup import Lookup
from gateway.proxy.metering.admissions import Admissions
from gateway.proxy.semantic_lookup import SemanticLookup
from gateway.routing.overrides import StrategyOverrides
from gateway.routing.prefixes.views import PrefixViews
from gateway.routing.router import Router
from gateway.routing.table import RoutingTable
from gateway.settings.settings import Settings
from gateway.telemetry.recent_requests import RecentRequests
from gateway.telemetry.statistics import Statistics

SETTINGS = web.AppKey("settings", Settings)
CACHE = web.AppKey("cache", ExactCache)
LOOKUP = web.AppKey("lookup", Lookup)
SEMANTIC = web.AppKey("semantic", SemanticLookup)
ROUTING = web.AppKey("routing", RoutingTable)
OVERRIDES = web.AppKey("overrides", StrategyOverrides)
VIEWS = web.AppKey("views", PrefixViews)
ROUTER = web.AppKey("router", Router)
PIPELINE = web.AppKey("pipeline", Pipeline)
EMBEDDINGS = web.AppKey("embeddings", Embeddings)
ADMISSIONS = web.AppKey("admissions", Admissions)
CONVERSATIONS = web.AppKey("conversations", ConversationKeeper)
GAUGES = web.AppKey("gauges", GaugeUpdater)
RECENT_REQUESTS = web.AppKey("recent_requests", RecentRequests)
STATISTICS = web.AppKey("statistics", Statistics)
