//! Redaction of a report before it is written. It removes names of the machine and its users, network and hardware
//! addresses, and addresses of a kernel.
//!
//! hvprobe itself writes none of these into a report. But a report contains foreign text that may have them:
//! messages of KVM and of a guest's kernel, and names of files.

use std::env;
use std::fs;
use std::path::Path;

/// Names to redact.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Each name with its replacement.
    all: Vec<(String, &'static str)>,
}

/// Names that many machines and users share, which are not redacted.
const COMMON: [&str; 4] = ["localhost", "(none)", "root", ""];

impl Names {
    /// Returns the names of this machine and its user.
    pub(super) fn of_this_machine() -> Self {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let variable = |name| env::var(name).unwrap_or_default();
        let home = variable("HOME");
        let home_name = Path::new(&home).file_name().and_then(|name| name.to_str());
        let users = [
            variable("USER"),
            variable("LOGNAME"),
            variable("SUDO_USER"),
            home_name.unwrap_or_default().to_owned(),
        ];
        Self::new(host.trim(), &users.each_ref().map(String::as_str))
    }

    /// Makes the list of names from `users` and from `host`, which is redacted with and without its domain.
    fn new(host: &str, users: &[&str]) -> Self {
        let short = host.split('.').next().unwrap_or(host);
        let hosts = [host, short].map(|name| (name, "[host]"));
        let users = users.iter().map(|name| (*name, "[user]"));
        let all = hosts
            .into_iter()
            .chain(users)
            .filter(|(name, _)| !COMMON.contains(name))
            .map(|(name, instead)| (name.to_owned(), instead));
        Self { all: all.collect() }
    }

    /// Returns `text` without these names and without addresses.
    pub(super) fn without(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (name, instead) in &self.all {
            text = replace_word(&text, name, instead);
        }
        without_addresses(&text)
    }
}

/// Returns `text` with each `word` replaced by `instead`, except where a letter or digit touches it.
fn replace_word(text: &str, word: &str, instead: &str) -> String {
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let (before, found) = rest.split_at(at);
        let after = &found[word.len()..];
        let touches = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let before_it = before.chars().next_back().or(replaced.chars().next_back());
        replaced.push_str(before);
        let part = touches(before_it) || touches(after.chars().next());
        replaced.push_str(if part { word } else { instead });
        rest = after;
    }
    replaced + rest
}

fn without_addresses(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        // Characters of an address; brackets and prefix lengths stay outside.
        let end = rest
            .find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, ':' | '.' | '-')))
            .unwrap_or(rest.len());
        if end == 0 {
            out.push(c);
            rest = &rest[c.len_utf8()..];
            continue;
        }
        let (word, after) = rest.split_at(end);
        out.push_str(&address(word));
        rest = after;
    }
    out
}

/// Replaces the IP, hardware or kernel address in `word`, if there is one, by the name of its kind in brackets.
fn address(word: &str) -> String {
    // The punctuation of the sentence around the word is no part of the address.
    let bare = word.trim_matches(['.', ':', '-']);
    let instead = if is_ip(bare) || bare.split('-').any(is_ip) {
        "[address]"
    } else if is_hardware(bare) {
        "[hardware address]"
    } else if has_kernel_address(bare) {
        "[kernel address]"
    } else {
        return word.to_owned();
    };
    word.replacen(bare, instead, 1)
}

fn is_ip(word: &str) -> bool {
    // An IPv4 address may have a port after it.
    let v4 = word.split(':').next().unwrap_or(word);
    v4.parse::<std::net::Ipv4Addr>().is_ok() || word.parse::<std::net::Ipv6Addr>().is_ok()
}

fn is_hardware(word: &str) -> bool {
    let pairs: Vec<&str> = word.split([':', '-']).collect();
    let pair = |pair: &&str| pair.len() == 2 && pair.bytes().all(|b| b.is_ascii_hexdigit());
    pairs.len() >= 6 && pairs.iter().all(pair)
}

/// Returns whether `word` contains a run of at least sixteen hexadecimal digits with `ffff` in it, as addresses
/// in the upper half of the address space have.
fn has_kernel_address(word: &str) -> bool {
    let lower = word.to_ascii_lowercase();
    lower
        .split(|c: char| !c.is_ascii_hexdigit())
        .any(|digits| digits.len() >= 16 && digits.contains("ffff"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(text: &str, expected: &str) {
        let names = Names::new("tower.example.org", &["ann", "root", ""]);
        assert_eq!(names.without(text), expected);
    }

    #[test]
    fn names_of_machine_and_user_are_taken_out_as_words() {
        check(
            "/home/ann/vmlinuz on tower.example.org, tower: annoy towers",
            "/home/[user]/vmlinuz on [host], [host]: annoy towers",
        );
        check("ann", "[user]");
        check("/root/vmlinuz", "/root/vmlinuz");
    }

    #[test]
    fn addresses_of_networks_and_cards_are_taken_out() {
        check(
            "from 192.168.1.17: to 10.0.0.1:22, [fe80::1%eth0] and 2001:db8::7.",
            "from [address]: to [address], [[address]%eth0] and [address].",
        );
        check(
            "52:54:00:12:34:56 52-54-00-ab-CD-ef",
            "[hardware address] [hardware address]",
        );
    }

    #[test]
    fn addresses_of_kernels_are_taken_out_and_others_stay() {
        check(
            "RIP 0xffffffff81000000, ffff888004050607 (RIP 0x10040)",
            "RIP [kernel address], [kernel address] (RIP 0x10040)",
        );
        check("RIP=0xFFFFC90000001000", "RIP=[kernel address]");
    }

    #[test]
    fn versions_times_and_numbers_stay() {
        for text in [
            "6.1.0-48-cloud-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.1.172-1 (2026-05-15)",
            "hvprobe 0.1.0 at 12:30:59, 5,000 calls: 1.5 ms, KVM_CAP_NR_MEMSLOTS=32764",
            "0xffffffff, -1",
            "",
        ] {
            check(text, text);
        }
    }

    #[test]
    fn this_machines_names_are_not_in_what_is_left() {
        let names = Names::of_this_machine();
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let host = host.trim();
        if !COMMON.contains(&host) {
            assert!(!names.without(&format!("it is {host}.")).contains(host));
        }
    }

    proptest! {
        #[test]
        fn nothing_forbidden_is_left_wherever_it_was(before in "[ -~]{0,8}", after in "[ -~]{0,8}") {
            let names = Names::new("tower", &["ann"]);
            for secret in ["0xffff888012345678", "192.168.77.201", "52:54:00:12:34:56", "tower"] {
                // The spaces matter: a letter that touches a name makes another word of it.
                let text = format!("{before} {secret} {after}");
                prop_assert!(!names.without(&text).contains(secret), "{}", text);
            }
        }
    }
}
