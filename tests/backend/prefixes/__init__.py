"""The prefix store as its users meet it: engines as processes, asked over HTTP, with a real Valkey between them.

What prefix stores have failed at before, and where it is tested that this one does not:

half of what belongs together is evicted, and the engine dies
    `test_no_block_behind_a_missing_one_is_used`, `tests.prefix_store.index.test_index.test_a_hole_ends_the_match`
the lookup hits, the read fails, the output is wrong
    `test_a_restarted_peer_is_not_taken_for_its_former_life`, `test_a_peer_that_failed_is_asked_again`,
    `test_a_damaged_frame_is_not_used_and_removed`,
    `tests.prefix_store.store.test_peer_reader.test_a_lie_of_the_index_costs_a_miss_and_is_told_once`
a read that failed counts as done, or another request's blocks are served
    `test_a_peer_with_wrong_frames_is_not_asked_again`, `test_frames_of_another_prompt_are_not_used`,
    `test_frames_under_other_blocks_names_are_not_used`, `test_concurrent_clients_get_their_own_prefixes`
a salt is equal to another identifier
    `tests.prefix_store.identity.test_keys.test_a_salt_is_hashed_in_a_domain_of_its_own`
processes hash with unlike seeds
    `test_a_peers_blocks_are_fetched_through_redis`,
    `tests.prefix_store.identity.test_keys.test_keys_are_the_same_in_every_process`
restoring takes longer than computing
    `test_a_peer_that_was_slow_is_asked_again`,
    `tests.prefix_store.store.test_store.test_a_slow_place_is_computed_and_the_figures_say_so`
what is pinned is never released
    `test_clients_that_leave_at_any_time`, `test_a_client_that_leaves_while_its_prefix_is_fetched`
a block is evicted during a read
    `tests.prefix_store.store.test_peer_reader.test_a_block_that_is_evicted_during_a_read_is_a_miss`,
    `tests.prefix_store.tiers.test_disk_faults.test_a_file_that_is_being_read_may_be_evicted`,
    `tests.prefix_store.tiers.test_memory.test_a_slot_that_is_used_is_freed_when_nobody_uses_it_any_more`
an owner restarts under its name, and the index still says that it has everything
    `test_a_restarted_peer_is_not_taken_for_its_former_life`,
    `tests.prefix_store.index.test_index.test_who_restarts_under_its_name_is_another`,
    `tests.prefix_store.peers.test_peers.test_a_peer_that_restarted_is_not_the_one_that_was_meant`
clients choose the salt
    `test_a_namespace_is_a_tenant`, `test_another_tenants_prefix_is_found_in_no_tier`
another layout, or other weights under one name, are taken for the same
    `test_models_of_one_name_that_differ_share_no_blocks`, `test_replaced_weights_are_another_model`,
    all of `test_lossy`,
    `tests.prefix_store.identity.test_fingerprint.test_every_part_counts`
the time of an answer tells what others have asked
    `test_another_tenants_prefix_is_found_in_no_tier`, which counts what is computed
"""
