-- What all scripts here share; it stands in front of each of them.
--
-- All keys of a namespace carry its {tag}, so they lie in one slot. KEYS, in every script:
--   1 live    sorted set: epoch -> until when its owner counts as alive, ms
--   2 owners  hash: name -> epoch (6 bytes), until when (6, ms), instance (8), details; '' -> the last epoch given out
--   3 block   the beginning of blocks' names: a block's key of 16 bytes follows
--   4 lease   the beginning of leases' names: the epoch of the owner that is read from follows, and for one lease its id
-- Numbers in values are big endian.
--   a block   claims of 11 bytes: epoch (6), tier and codec (1), until when, seconds (4)
--   a lease   the keys that it holds, until its deadline; an owner's leases: a sorted set, id (8 bytes) -> deadline, ms
local CLAIM, KEY = 11, 16
-- A block that everybody holds is found with a few of its holders; more would make each look at it slower.
local MAX_CLAIMS = 16
local AT_ONCE = 128

local live, owners, block, lease = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local sub, byte = string.sub, string.byte
local clock = redis.call('TIME')
local seconds = tonumber(clock[1])
local milliseconds = seconds * 1000 + math.floor(tonumber(clock[2]) / 1000)

local function expiry(value, claim)
  local a, b, c, d = byte(value, claim + 7, claim + 10)
  return ((a * 256 + b) * 256 + c) * 256 + d
end

-- Where the claim of an epoch begins in a block's value; nil where there is none.
local function claim_of(value, epoch)
  if not value or #value % CLAIM ~= 0 then return nil end
  for claim = 1, #value, CLAIM do
    if sub(value, claim, claim + 5) == epoch then return claim end
  end
  return nil
end

local function names(prefix, keys, first, last)
  local found, at = {}, (first - 1) * KEY
  for i = 1, last - first + 1 do
    found[i] = prefix .. sub(keys, at + 1, at + KEY)
    at = at + KEY
  end
  return found
end

-- Calls look(number, name, value) for each of the keys, in order, until it returns false.
local function each(prefix, keys, look)
  local count = #keys / KEY
  for first = 1, count, AT_ONCE do
    local last = math.min(count, first + AT_ONCE - 1)
    local batch = names(prefix, keys, first, last)
    local values = redis.call('MGET', unpack(batch))
    for i = 1, #batch do
      if look(first + i - 1, batch[i], values[i]) == false then return end
    end
  end
end

-- Writes claims; the block lasts as long as the last of them.
local function set_claims(name, value)
  local last = 0
  for claim = 1, #value, CLAIM do last = math.max(last, expiry(value, claim)) end
  redis.call('SET', name, value, 'EXAT', last)
end

local function is_alive(epoch)
  local ends = redis.call('ZSCORE', live, epoch)
  return ends and tonumber(ends) > milliseconds
end
