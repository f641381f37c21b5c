//! CPUID features shown to the guest.
//!
//! Invariants: a feature is shown only together with all features that it requires, even if KVM reports it without
//! them. Features that would interfere with probes ([`HIDDEN`]) are not shown, so KVM does not let the guest turn
//! them on.

use kvm_bindings::kvm_cpuid_entry2;

/// A register of a CPUID leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}
use Register::{Eax, Ebx, Ecx, Edx};

/// One feature: leaf, subleaf, register, bit number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Feature(u32, u32, Register, u32);

impl Feature {
    fn word<'e>(&self, entries: &'e mut [kvm_cpuid_entry2]) -> Option<&'e mut u32> {
        let entry = entries
            .iter_mut()
            .find(|entry| (entry.function, entry.index) == (self.0, self.1))?;
        Some(match self.2 {
            Eax => &mut entry.eax,
            Ebx => &mut entry.ebx,
            Ecx => &mut entry.ecx,
            Edx => &mut entry.edx,
        })
    }

    fn is_in(&self, entries: &mut [kvm_cpuid_entry2]) -> bool {
        self.word(entries)
            .is_some_and(|word| *word >> self.3 & 1 == 1)
    }

    fn hide(&self, entries: &mut [kvm_cpuid_entry2]) {
        if let Some(word) = self.word(entries) {
            *word &= !(1 << self.3);
        }
    }
}

/// VMX and [`SVM`] would let the guest run a nested guest, which may have code at the addresses of our probepoints,
/// and whose int3s would exit as the guest's own do.
const VMX: Feature = Feature(1, 0, Ecx, 5);
const SVM: Feature = Feature(0x8000_0001, 0, Ecx, 2);
/// With FRED, exceptions do not go through the IDT, which the exception window replaces with its own.
const FRED: Feature = Feature(7, 1, Eax, 17);
const HIDDEN: [Feature; 3] = [VMX, SVM, FRED];
/// Leaf with details of SVM.
const SVM_LEAF: u32 = 0x8000_000a;

const FXSR: Feature = Feature(1, 0, Edx, 24);
const SSE: Feature = Feature(1, 0, Edx, 25);
const SSE2: Feature = Feature(1, 0, Edx, 26);
const XSAVE: Feature = Feature(1, 0, Ecx, 26);
const AVX: Feature = Feature(1, 0, Ecx, 28);
const AVX512F: Feature = Feature(7, 0, Ebx, 16);
const AVX512BW: Feature = Feature(7, 0, Ebx, 30);
const AVX512VL: Feature = Feature(7, 0, Ebx, 31);
const AMX_TILE: Feature = Feature(7, 0, Edx, 24);
const XSAVES: Feature = Feature(XSAVE_LEAF, 1, Eax, 3);
/// Leaf with the state that XSAVE saves: subleaf 0 has a bit for each state component.
const XSAVE_LEAF: u32 = 0xd;
const fn state(part: u32) -> Feature {
    Feature(XSAVE_LEAF, 0, Eax, part)
}

/// Pairs of a feature and a feature it requires (SDM vol. 1, chapters 12 to 18; the kernel's own list is
/// arch/x86/kernel/cpu/cpuid-deps.c).
const NEEDS: [(Feature, Feature); 72] = [
    // SSE, and instructions on SSE registers.
    (SSE, FXSR),
    (SSE2, SSE),
    (Feature(1, 0, Ecx, 0), SSE2),           // SSE3
    (Feature(1, 0, Ecx, 1), SSE2),           // PCLMULQDQ
    (Feature(1, 0, Ecx, 9), SSE2),           // SSSE3
    (Feature(1, 0, Ecx, 19), SSE2),          // SSE4.1
    (Feature(1, 0, Ecx, 20), SSE2),          // SSE4.2
    (Feature(1, 0, Ecx, 25), SSE2),          // AES
    (Feature(7, 0, Ebx, 29), SSE2),          // SHA
    (Feature(7, 0, Ecx, 8), SSE2),           // GFNI
    (Feature(0x8000_0001, 0, Ecx, 6), SSE2), // SSE4A
    // XSAVE, its variants, and features whose state only XSAVE saves.
    (XSAVE, FXSR),
    (Feature(1, 0, Ecx, 27), XSAVE),         // OSXSAVE
    (Feature(XSAVE_LEAF, 1, Eax, 0), XSAVE), // XSAVEOPT
    (Feature(XSAVE_LEAF, 1, Eax, 1), XSAVE), // XSAVEC
    (Feature(XSAVE_LEAF, 1, Eax, 2), XSAVE), // XGETBV with ECX = 1
    (XSAVES, XSAVE),
    (XSAVES, Feature(XSAVE_LEAF, 1, Eax, 1)), // XSAVES, XSAVEC
    (Feature(XSAVE_LEAF, 1, Eax, 4), XSAVES), // XFD
    (Feature(7, 0, Ecx, 3), XSAVE),           // PKU
    (Feature(7, 0, Ecx, 3), state(9)),
    (Feature(7, 0, Ecx, 4), Feature(7, 0, Ecx, 3)), // OSPKE, PKU
    (Feature(7, 0, Ebx, 14), XSAVE),                // MPX
    (Feature(7, 0, Ebx, 14), state(3)),
    (Feature(7, 0, Ebx, 14), state(4)),
    (Feature(7, 0, Ecx, 7), XSAVES),  // shadow stacks
    (Feature(7, 0, Edx, 20), XSAVES), // indirect branch tracking
    (AVX, XSAVE),
    (AVX, SSE2),
    (AVX, state(2)),
    (AMX_TILE, XSAVE),
    (AMX_TILE, state(17)),
    (AMX_TILE, state(18)),
    // AVX.
    (Feature(1, 0, Ecx, 12), AVX),           // FMA
    (Feature(1, 0, Ecx, 29), AVX),           // F16C
    (Feature(7, 0, Ebx, 5), AVX),            // AVX2
    (Feature(7, 0, Ecx, 9), AVX),            // VAES
    (Feature(7, 0, Ecx, 10), AVX),           // VPCLMULQDQ
    (Feature(7, 1, Eax, 0), AVX),            // SHA512
    (Feature(7, 1, Eax, 1), AVX),            // SM3
    (Feature(7, 1, Eax, 2), AVX),            // SM4
    (Feature(7, 1, Eax, 4), AVX),            // AVX-VNNI
    (Feature(7, 1, Eax, 23), AVX),           // AVX-IFMA
    (Feature(7, 1, Edx, 4), AVX),            // AVX-VNNI-INT8
    (Feature(7, 1, Edx, 5), AVX),            // AVX-NE-CONVERT
    (Feature(7, 1, Edx, 10), AVX),           // AVX-VNNI-INT16
    (Feature(7, 1, Edx, 19), AVX),           // AVX10
    (Feature(0x8000_0001, 0, Ecx, 11), AVX), // XOP
    (Feature(0x8000_0001, 0, Ecx, 16), AVX), // FMA4
    // AVX-512.
    (AVX512F, AVX),
    (AVX512F, state(5)),
    (AVX512F, state(6)),
    (AVX512F, state(7)),
    (Feature(7, 0, Ebx, 17), AVX512F), // AVX512DQ
    (Feature(7, 0, Ebx, 21), AVX512F), // AVX512_IFMA
    (Feature(7, 0, Ebx, 26), AVX512F), // AVX512PF
    (Feature(7, 0, Ebx, 27), AVX512F), // AVX512ER
    (Feature(7, 0, Ebx, 28), AVX512F), // AVX512CD
    (AVX512BW, AVX512F),
    (AVX512VL, AVX512F),
    (Feature(7, 0, Ecx, 1), AVX512F),   // AVX512_VBMI
    (Feature(7, 0, Ecx, 6), AVX512VL),  // AVX512_VBMI2
    (Feature(7, 0, Ecx, 11), AVX512VL), // AVX512_VNNI
    (Feature(7, 0, Ecx, 12), AVX512VL), // AVX512_BITALG
    (Feature(7, 0, Ecx, 14), AVX512F),  // AVX512_VPOPCNTDQ
    (Feature(7, 0, Edx, 2), AVX512F),   // AVX512_4VNNIW
    (Feature(7, 0, Edx, 3), AVX512F),   // AVX512_4FMAPS
    (Feature(7, 0, Edx, 8), AVX512VL),  // AVX512_VP2INTERSECT
    (Feature(7, 0, Edx, 23), AVX512BW), // AVX512_FP16
    (Feature(7, 1, Eax, 5), AVX512VL),  // AVX512_BF16
    // AMX.
    (Feature(7, 0, Edx, 22), AMX_TILE), // AMX-BF16
    (Feature(7, 0, Edx, 25), AMX_TILE), // AMX-INT8
];

/// Hides all features in [`HIDDEN`], and every feature that requires a missing one. Clears the SVM leaf and,
/// without XSAVE, the XSAVE leaf.
pub(super) fn mend(entries: &mut [kvm_cpuid_entry2]) {
    for feature in HIDDEN {
        feature.hide(entries);
    }
    let mut changed = true;
    while changed {
        changed = false;
        for (feature, needed) in NEEDS {
            if feature.is_in(entries) && !needed.is_in(entries) {
                feature.hide(entries);
                changed = true;
            }
        }
    }
    let saves = XSAVE.is_in(entries);
    for entry in entries {
        if entry.function == SVM_LEAF || entry.function == XSAVE_LEAF && !saves {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LEAVES: [(u32, u32); 7] = [
        (1, 0),
        (7, 0),
        (7, 1),
        (XSAVE_LEAF, 0),
        (XSAVE_LEAF, 1),
        (0x8000_0001, 0),
        (SVM_LEAF, 0),
    ];

    /// Returns the [`LEAVES`], each with the registers `words`.
    fn filled(words: [u32; 4]) -> Vec<kvm_cpuid_entry2> {
        let [eax, ebx, ecx, edx] = words;
        let entry = |(function, index)| kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        };
        LEAVES.map(entry).to_vec()
    }

    fn mended(mut entries: Vec<kvm_cpuid_entry2>) -> Vec<kvm_cpuid_entry2> {
        mend(&mut entries);
        entries
    }

    /// Returns the number of bits set in leaf `function`, subleaf `index`.
    fn bits(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> u32 {
        let of = entries
            .iter()
            .filter(|e| (e.function, e.index) == (function, index));
        of.flat_map(|e| [e.eax, e.ebx, e.ecx, e.edx])
            .map(u32::count_ones)
            .sum()
    }

    #[test]
    fn a_processor_with_everything_loses_only_what_is_hidden() {
        let before = filled([u32::MAX; 4]);
        let after = mended(before.clone());
        let lost = |function, index| bits(&before, function, index) - bits(&after, function, index);
        let counts = LEAVES.map(|(function, index)| lost(function, index));
        // VMX; FRED; SVM and its whole leaf.
        assert_eq!(counts, [1, 0, 1, 0, 0, 1, 128]);
        let mut after = after;
        assert!(HIDDEN.iter().all(|feature| !feature.is_in(&mut after)));
    }

    #[test]
    fn without_xsave_there_is_no_state_that_only_xsave_saves() {
        let mut entries = filled([u32::MAX; 4]);
        XSAVE.hide(&mut entries);
        let mut entries = mended(entries);
        for feature in [
            AVX,
            AVX512F,
            AMX_TILE,
            Feature(1, 0, Ecx, 12),
            Feature(1, 0, Ecx, 29),
            Feature(7, 0, Ebx, 5),
            Feature(7, 0, Ecx, 3),
            Feature(7, 0, Ecx, 9),
            Feature(7, 0, Ecx, 10),
            Feature(7, 0, Ecx, 14),
            Feature(7, 1, Eax, 5),
        ] {
            assert!(!feature.is_in(&mut entries), "{feature:?}");
        }
        assert_eq!(bits(&entries, XSAVE_LEAF, 0), 0);
        assert_eq!(bits(&entries, XSAVE_LEAF, 1), 0);
        // AES needs no more than SSE.
        assert!(Feature(1, 0, Ecx, 25).is_in(&mut entries));
    }

    #[test]
    fn without_the_state_of_avx_512_avx2_stays() {
        let mut entries = filled([u32::MAX; 4]);
        state(6).hide(&mut entries);
        let mut entries = mended(entries);
        assert!(!AVX512F.is_in(&mut entries) && !Feature(7, 0, Ecx, 12).is_in(&mut entries));
        assert!(AVX.is_in(&mut entries) && Feature(7, 0, Ebx, 5).is_in(&mut entries));
    }

    proptest! {
        #[test]
        fn whatever_is_shown_has_what_it_needs(words in any::<[[u32; 4]; 7]>(), there in 0..128_u32) {
            let mut entries: Vec<_> = words
                .into_iter()
                .flat_map(filled)
                .zip(0..)
                // Keep the nth leaf of the nth filling, if `there` has bit n.
                .filter(|(_, n)| n / 7 == n % 7 && there >> (n % 7) & 1 == 1)
                .map(|(entry, _)| entry)
                .collect();
            let before = entries.clone();
            mend(&mut entries);
            for (feature, needed) in NEEDS {
                prop_assert!(!feature.is_in(&mut entries) || needed.is_in(&mut entries));
            }
            for (before, after) in before.iter().zip(&entries) {
                prop_assert_eq!((after.function, after.index), (before.function, before.index));
                prop_assert_eq!(after.ecx & !before.ecx, 0);
            }
        }
    }
}
