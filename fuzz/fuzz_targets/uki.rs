#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    hvprobe_tests::fuzz::uki(data);
});
