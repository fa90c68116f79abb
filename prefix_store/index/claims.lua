-- What all scripts here share; it stands in front of each of them.
--
-- All keys of a namespace carry its {tag}, so they lie in one slot. KEYS, in every script:
--   1 live    sorted set: epoch -> until when its owner counts as alive, ms
--   2 owners  hash: name -> epoch (6 bytes), until when (6, ms), instance (8), details; '' -> the last epoch given out
--   3 block   the beginning of blocks' names: a block's key of 16 bytes follows
-- Numbers in values are big endian. A block's value: claims of 11 bytes, each of epoch (6), tier and codec (1), until
-- when, seconds (4).
local CLAIM, KEY = 11, 16
-- A block that everybody holds is found with a few of its holders; more would make each look at it slower.
local MAX_CLAIMS = 16
local AT_ONCE = 128

local live, owners, block = KEYS[1], KEYS[2], KEYS[3]
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

-- Calls look(name, value) for each of the keys, in order.
local function each(keys, look)
  for first = 1, #keys, AT_ONCE * KEY do
    local names = {}
    for at = first, math.min(#keys, first + AT_ONCE * KEY - 1), KEY do
      names[#names + 1] = block .. sub(keys, at, at + KEY - 1)
    end
    local values = redis.call('MGET', unpack(names))
    for i = 1, #names do look(names[i], values[i]) end
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
